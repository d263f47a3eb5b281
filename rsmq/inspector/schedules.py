"""The schedules as the server knows them: rule, next and last tick, leader. Nothing here writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from rsmq.handler.schedule import ScheduleRule, Trigger, read_rule
from rsmq.model.clock import LATEST_MS, from_epoch_ms, server_ms
from rsmq.model.keys import Keys, check_name
from rsmq.model.schedule_run import ScheduleRun, read_runs
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import as_dict, ask_all
from rsmq.redis.topics import Topic, Topics


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """One schedule that some worker has served.

    `leader` is empty without a leader: then nothing is published. `runs` are the last ones, oldest first; `last` is the
    newest of them that published, or had nothing to publish, and None of a schedule that never has. `failures` counts
    the attempts that have failed since, `trace` is the traceback of the newest. `rule` is that of the code, `set_rule`
    that of an operator, which takes its place. `next` is None while it is paused, and if the rule cannot be read here
    (a cron expression without the extra). `run_asked` is when an operator has asked for a run that is not published
    yet.
    """

    topic: str
    name: str
    partition: int
    rule: ScheduleRule
    set_rule: ScheduleRule | None
    next: datetime | None
    last: datetime | None
    leader: str
    lease_left: timedelta | None
    paused: datetime | None
    run_asked: datetime | None
    failures: int
    trace: str
    runs: tuple[ScheduleRun, ...]
    is_added: bool = False
    """Whether no code has it."""

    @property
    def newest(self) -> ScheduleRun | None:
        """The last run, also one that has failed."""
        return self.runs[-1] if self.runs else None


async def look_up(client: Client, keys: Keys, topics: Topics, name: str | None = None) -> list[ScheduleState]:
    """The schedules of one topic, or of all, by topic and name."""
    return await schedules_of(
        client, keys, await topics.find_all(await topics.names() if name is None else [check_name("topic", name)])
    )


async def schedules_of(client: Client, keys: Keys, topics: Sequence[Topic]) -> list[ScheduleState]:
    """The schedules of these topics, by topic and name: one exchange, of a command for each partition."""
    partitions = [(topic.name, number) for topic in topics for number in topic.numbers]
    time, *replies = await ask_all(client, [("TIME",), *(("HGETALL", keys.every(*each)) for each in partitions)])
    now_ms = server_ms(time)
    states = list[ScheduleState]()
    for (topic, number), reply in zip(partitions, replies, strict=True):
        fields = {key: value.decode(errors="replace") for key, value in as_dict(reply).items()}
        names = dict.fromkeys(field.partition("|")[2] for field in fields if field.startswith(("rule|", "last|")))
        states += [_state(topic, each, number, fields, now_ms) for each in names]
    return sorted(states, key=lambda state: (state.topic, state.name))


def _state(topic: str, name: str, partition: int, fields: Mapping[str, str], now_ms: int) -> ScheduleState:
    last, until, paused = (_number(fields.get(f"{each}|{name}")) for each in ("last", "until", "paused"))
    rule, given = read_rule(fields.get(f"rule|{name}", "")), fields.get(f"set|{name}")
    set_rule = read_rule(given) if given else None
    trigger, is_led = (set_rule or rule).trigger, until is not None and until > now_ms
    runs = tuple(read_runs(fields.get(f"history|{name}", "")))
    done = [run for run in runs if run.result in ("published", "nothing")]
    return ScheduleState(
        topic=topic,
        name=name,
        partition=partition,
        rule=rule,
        set_rule=set_rule,
        next=None if trigger is None or paused else _tick(trigger, max(now_ms, last or 0)),
        last=done[-1].time if done else None,
        leader=fields.get(f"owner|{name}", "") if is_led else "",
        lease_left=timedelta(milliseconds=until - now_ms) if until is not None and is_led else None,
        paused=_moment(paused),
        run_asked=_moment(_number(fields.get(f"run|{name}"))),
        failures=_number(fields.get(f"failures|{name}")) or 0,
        trace=fields.get(f"trace|{name}", ""),
        runs=runs,
        is_added=f"added|{name}" in fields,
    )


def _number(text: str | None) -> int | None:
    """A whole number of a record; None for none, and for what another client has spoiled."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= 16 else None


def _tick(trigger: Trigger, after_ms: int) -> datetime | None:
    """The next tick; None for a rule without one, such as the 30th of February, and beyond the year 9999."""
    try:
        return _moment(trigger.after(min(after_ms, LATEST_MS)))
    except (ValueError, OverflowError, StopIteration):
        return None


def _moment(ms: int | None) -> datetime | None:
    return None if ms is None or ms > LATEST_MS else from_epoch_ms(ms)
