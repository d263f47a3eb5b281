"""The schedules as the server knows them: rule, next and last tick, leader. Nothing here writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from pydantic import TypeAdapter, ValidationError

from rsmq.handler.schedule import ScheduleRule
from rsmq.model.clock import from_epoch_ms
from rsmq.model.keys import Keys, check_name
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import as_dict, ask_all
from rsmq.redis.topics import Topics

RULES: Final = TypeAdapter(ScheduleRule)


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """One schedule that some worker has served.

    `leader` is empty without a leader: then nothing is published. `last` is the newest published tick (of a new
    schedule its beginning). `next` is None if the rule cannot be read here (a cron expression without the extra).
    `run_asked` is when an operator has asked for a run that is not published yet.
    """

    topic: str
    name: str
    partition: int
    rule: ScheduleRule
    next: datetime | None
    last: datetime | None
    leader: str
    lease_left: timedelta | None
    run_asked: datetime | None


async def look_up(client: Client, keys: Keys, topics: Topics, name: str | None = None) -> list[ScheduleState]:
    """The schedules of one topic, or of all, by topic and name. Costs one command a partition."""
    found = await topics.find_all(await topics.names() if name is None else [check_name("topic", name)])
    partitions = [(topic.name, number) for topic in found for number in topic.numbers]
    time, *replies = await ask_all(client, [("TIME",), *(("HGETALL", keys.every(*each)) for each in partitions)])
    now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
    states = list[ScheduleState]()
    for (topic, number), reply in zip(partitions, replies, strict=True):
        fields = {key: value.decode() for key, value in as_dict(reply).items()}
        names = dict.fromkeys(field.partition("|")[2] for field in fields)
        states += [_state(topic, each, number, fields, now_ms) for each in names]
    return sorted(states, key=lambda state: (state.topic, state.name))


def _state(topic: str, name: str, partition: int, fields: Mapping[str, str], now_ms: int) -> ScheduleState:
    asked = _number(fields.get(f"run|{name}"))
    last, until = _number(fields.get(f"last|{name}")), _number(fields.get(f"until|{name}"))
    try:
        rule = RULES.validate_json(fields.get(f"rule|{name}", "{}"))
    except ValidationError:  # of a newer version
        rule = ScheduleRule()
    trigger, is_led = rule.trigger, until is not None and until > now_ms
    return ScheduleState(
        topic=topic,
        name=name,
        partition=partition,
        rule=rule,
        next=None if trigger is None else from_epoch_ms(trigger.after(max(now_ms, last or 0))),
        last=None if last is None else from_epoch_ms(last),
        leader=fields.get(f"owner|{name}", "") if is_led else "",
        lease_left=timedelta(milliseconds=until - now_ms) if until is not None and is_led else None,
        run_asked=None if asked is None else from_epoch_ms(asked),
    )


def _number(text: str | None) -> int | None:
    return int(float(text)) if text else None
