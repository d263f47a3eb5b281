"""The timetable: which schedules publish, when, and who leads them, read from the server. Nothing here writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from pydantic import ValidationError

from rsmq.clock import from_epoch_ms
from rsmq.connect import Client
from rsmq.errors import RsmqError
from rsmq.keys import Keys
from rsmq.schedule import Rule
from rsmq.stream import as_dict, pipelined
from rsmq.topic import Topic, Topics


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """One schedule that some worker has served.

    `leader` is empty while nobody leads it: then nothing is published. `last` is the newest tick that is done (for a
    new schedule its beginning). `next` is None if the rule cannot be told here (a cron expression without the extra).
    """

    topic: str
    name: str
    partition: int
    rule: Rule
    next: datetime | None
    last: datetime | None
    leader: str
    lease_left: timedelta | None


async def look_up(client: Client, keys: Keys, topics: Topics, name: str | None = None) -> list[ScheduleState]:
    """The schedules of one topic, or of all, by topic and name. Costs one question a partition."""
    found = [await topics.find(each) for each in (await topics.names() if name is None else [name])]
    places = [(topic, number) for topic in found if topic is not None for number in range(topic.partitions)]
    if not places:
        return []
    questions = [("HGETALL", keys.every(topic.name, number)) for topic, number in places]
    time, *replies = await pipelined(client, [("TIME",), *questions])
    now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
    states = list[ScheduleState]()
    for (topic, number), reply in zip(places, replies, strict=True):
        if isinstance(reply, Exception):
            raise RsmqError(f"the schedules of {topic.name}.{number} cannot be read: {reply}")
        states += _states(topic, number, {key: value.decode() for key, value in as_dict(reply).items()}, now_ms)
    return sorted(states, key=lambda state: (state.topic, state.name))


def _states(topic: Topic, partition: int, fields: Mapping[str, str], now_ms: int) -> list[ScheduleState]:
    names = dict.fromkeys(field.partition("|")[2] for field in fields)
    return [_state(topic.name, name, partition, fields, now_ms) for name in names]


def _state(topic: str, name: str, partition: int, fields: Mapping[str, str], now_ms: int) -> ScheduleState:
    last, until = _number(fields.get(f"last|{name}")), _number(fields.get(f"until|{name}"))
    rule = _rule(fields.get(f"rule|{name}", "{}"))
    times, is_led = rule.times, until is not None and until > now_ms
    return ScheduleState(
        topic=topic,
        name=name,
        partition=partition,
        rule=rule,
        next=None if times is None else from_epoch_ms(times.after(max(now_ms, last or 0))),
        last=None if last is None else from_epoch_ms(last),
        leader=fields.get(f"owner|{name}", "") if is_led else "",
        lease_left=timedelta(milliseconds=until - now_ms) if until is not None and is_led else None,
    )


def _number(text: str | None) -> int | None:
    return int(float(text)) if text else None


def _rule(text: str) -> Rule:
    try:
        return Rule.model_validate_json(text)
    except ValidationError:  # of a newer version
        return Rule()
