"""How states are written for people, in the same way by commands, the doctor and the dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from rsmq.handler.schedule import ScheduleRule
from rsmq.inspector.schedules import ScheduleState
from rsmq.inspector.state import MemberState
from rsmq.inspector.trend import GroupTrend
from rsmq.model.held_name import HeldName
from rsmq.model.layout import Block
from rsmq.model.schedule_run import ScheduleRun
from rsmq.model.words import count, duration, number
from rsmq.model.work import Work
from rsmq.redis.topics import Topic

NONE: Final = "–"
MOST_NAMED: Final = 3
MOST_LEFT: Final = 10
"""Partitions that are named, of those that a group has not finished."""
ARROWS: Final = {"growing": "↑", "shrinking": "↓", "steady": "→"}


def rate(value: float | None) -> str:
    """Messages a second."""
    return NONE if value is None else f"{value:.1f}" if 0 < value < 10 else number(round(value))


def age(value: timedelta | None) -> str:
    """A duration, if it is known."""
    return NONE if value is None else duration(value)


def waiting_of(member: MemberState) -> str:
    """How many messages of a member wait for a rate, and whose they are; and which tenants have most that have not
    started, and which keys it misses. Empty for none."""
    waiting, found = member.work.waiting_for_rate, []
    if waiting:
        most = ", ".join(f"{name} {number(count)}" for name, count in member.waiting_for_rate_by)
        found.append(
            f"{number(waiting)} {'waits' if waiting == 1 else 'wait'} for a rate" + (f" ({most})" if most else "")
        )
    if member.waiting_by_tenant:
        most = ", ".join(f"{name or 'none'} {number(count)}" for name, count in member.waiting_by_tenant)
        found.append(f"tenants {most}")
    if member.missing_keys:
        names = ", ".join(name for name, _ in member.missing_keys)
        found.append(f"messages need the {names}, which it does not have")
    return "; ".join(found)


def waiting(work: Work) -> str:
    """How many messages wait, and for what; empty for none."""
    return ", ".join(f"{number(count)} for a {reason}" for reason, count in work.reasons.items() if count)


def ready(group: GroupTrend) -> str:
    """How many messages are ready; an upper bound while members have not told what they do with theirs."""
    return f"{'<= ' if group.untold else ''}{number(group.work.ready)}"


def untold(group: GroupTrend) -> str:
    """That members have not told what their messages do; empty if all have."""
    if not group.untold:
        return ""
    some = ", ".join(group.untold[:MOST_NAMED]) + (", ..." if len(group.untold) > MOST_NAMED else "")
    whose = (
        "has not told lately what becomes of its" if len(group.untold) == 1 else "have not told what becomes of their"
    )
    return f"{some} {whose} messages: they count as ready"


def timestamp(at: datetime | None) -> str:
    """In UTC, to the second; empty for None."""
    return "" if at is None else at.strftime("%Y-%m-%d %H:%M:%SZ")


def state(group: GroupTrend) -> str:
    """Whether a group is paused, unserved, stalled or running."""
    if group.is_paused or group.is_unserved:
        return "paused" if group.is_paused else "unserved"
    return "running" if group.stalled is None else "stalled"


def trend(group: GroupTrend) -> str:
    """Whether a group's backlog grows or shrinks, how fast, and when it will be empty."""
    if group.growth is None:
        return NONE
    if group.trend == "steady":
        return ARROWS["steady"]
    until = f", empty in {duration(group.empty_in)}" if group.empty_in is not None else ""
    return f"{ARROWS[group.trend]} {group.growth:+,.0f}/s{until}"


def held(each: HeldName) -> str:
    """A name of which nothing starts, by whom and until when."""
    return f"{each.name or 'everything'} is held by a {each.kind} until {timestamp(each.until)}"


def rules(state: ScheduleState) -> str:
    """When it ticks; the rule of the code beside that of an operator."""
    if state.set_rule is None:
        return described(state.rule)
    return f"{described(state.set_rule)} (code: {described(state.rule)})"


def result_of(state: ScheduleState) -> str:
    """What became of the last run."""
    if state.failures:
        return f"failed {count(state.failures, 'time')}"
    return "" if state.newest is None else state.newest.result


def note_of(run: ScheduleRun) -> str:
    """What there is to say of a run."""
    notes = (
        "asked for" if run.is_asked else "",
        f"attempt {run.attempts}" if run.result == "failed" else "",
        f"{count(run.skipped, 'tick')} not published" if run.skipped else "",
        run.error or run.message_id,
    )
    return ", ".join(note for note in notes if note)


def described(rule: ScheduleRule) -> str:
    """When it ticks."""
    if rule.every_ms is not None:
        return f"every {duration(timedelta(milliseconds=rule.every_ms))}"
    return "" if rule.cron is None else f"{rule.cron} {rule.timezone}"


def limits_of(topic: Topic) -> dict[str, str]:
    """What a topic may hold and what it keeps, by name: length, bands, blocks, retention, archive. What it has not
    is left out."""
    length = "no limit"
    if topic.max_length:
        length = f"{count(topic.max_length, 'message')} in a partition, then {topic.on_full}"
    kept = duration(topic.retention_age)
    found = {
        "length": length,
        "bands": bands_of(topic),
        "blocks": blocks_of(topic),
        "retention": f"settled messages for {kept}, at most {number(topic.retention_length)} in a partition",
        "archive": "required, nothing is trimmed before `rsmq pipeline archive` has committed it"
        if topic.archive == "required" else "",
    }  # fmt: skip
    return {name: said for name, said in found.items() if said}


def describe_left(left: Mapping[int, int]) -> str:
    """How many messages a group has not settled in sealed partitions, such as `7 messages in partition 3 (5) and 4 (2)`
    for `{3: 5, 4: 2}`."""
    if len(left) == 1:
        ((partition, number),) = left.items()
        return f"{count(number, 'message')} in partition {partition}"
    named = [f"{partition} ({number})" for partition, number in sorted(left.items())]
    rest = [f"{len(named) - MOST_LEFT} more"] if len(named) > MOST_LEFT else []
    *first, last = [*named[:MOST_LEFT], *rest]
    return f"{count(sum(left.values()), 'message')} in partitions {', '.join(first)} and {last}"


def blocks_of(topic: Topic) -> str:
    """The partitions of a topic that was resized, or is to be; empty for others."""
    layout = topic.layout
    if all(block.parent is None for block in layout.blocks):
        return ""
    states = {
        "added": "added, messages go there when all members know them", "closed": "closed",
        "opening": "about to be used, the partitions before are being sealed",
        "open": "messages go there", "sealed": "sealed, their messages come first",
    }  # fmt: skip
    names = [f"{each.band} " if layout.has_bands else "" for each in layout.blocks]
    return "; ".join(
        f"{name}{numbers_of(each)} {states[each.state]}" for name, each in zip(names, layout.blocks, strict=True)
    )


def bands_of(topic: Topic) -> str:
    """The bands of a topic with their partitions; empty without."""
    layout = topic.layout
    if not layout.has_bands:
        return ""
    states = {"added": " (not open yet)", "opening": "", "closed": " (closed)", "open": "", "sealed": ""}
    blocks = [block for band in layout.order if (block := layout.block_of(band)) is not None]
    return ", ".join(f"{each.band} {numbers_of(each)}{states[each.state]}" for each in blocks)


def numbers_of(block: Block) -> str:
    """The partitions of a block: the first and the last, or each one that was chosen."""
    if block.chosen:
        return ", ".join(map(str, block.chosen))
    return f"{block.first}-{block.first + block.count - 1}"
