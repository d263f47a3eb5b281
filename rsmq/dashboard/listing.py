"""Topics, groups, partitions and members as tables: several pages show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nicegui import ui

from rsmq.dashboard.frame import Frame, Row, age, number, rate, table
from rsmq.trend import GroupRow, MemberRow, ShareRow, TopicRow

ARROWS: Final = {"growing": "↑", "shrinking": "↓", "steady": "→", "": ""}


def topic_table() -> ui.table:
    """Empty yet."""
    return table(["topic", "#partitions", "#messages", "#delayed", "#in/s", "#groups"], link="topic", title="Topics")


def topic_rows(frame: Frame, topics: Sequence[TopicRow]) -> list[Row]:
    """A line each."""
    return [
        {
            "topic": topic.name, "partitions": topic.partitions, "messages": number(topic.messages),
            "delayed": number(topic.delayed), "in/s": rate(topic.rate_in), "groups": topic.groups,
            "url": frame.url("topic", topic.name),
        }
        for topic in topics
    ]  # fmt: skip


def group_table() -> ui.table:
    """Empty yet."""
    columns = ["group", "topic", "state", "#settled/s", "#lag", "trend", "#oldest", "#in hand", "#parked", "#dead"]
    return table([*columns, "owned"], link="group", title="Groups")


def group_rows(frame: Frame, groups: Sequence[GroupRow]) -> list[Row]:
    """A line each."""
    return [
        {
            "group": group.name, "topic": group.topic, "state": state(group), "settled/s": rate(group.rate_out),
            "lag": number(group.lag), "trend": trend(group), "oldest": age(group.oldest),
            "in hand": number(group.in_hand), "parked": number(group.parked), "dead": number(group.dead_letters),
            "owned": f"{group.owned}/{len(group.shares)}", "url": frame.url("group", group.topic, group.name),
        }
        for group in groups
    ]  # fmt: skip


def state(group: GroupRow) -> str:
    """One word."""
    return "paused" if group.is_paused else "unserved" if group.is_unserved else "running"


def trend(group: GroupRow) -> str:
    """Where its backlog goes."""
    if group.growth is None or group.trend == "steady":
        return ARROWS[group.trend]
    until = f", empty in {age(group.empty_in)}" if group.empty_in is not None else ""
    return f"{ARROWS[group.trend]} {group.growth:+,.0f}/s{until}"


def share_table() -> ui.table:
    """Empty yet."""
    columns = ["#partition", "owner", "#epoch", "#lag", "#oldest", "#in hand", "#parked", "#dead"]
    return table(columns, title="Partitions")


def share_rows(shares: Sequence[ShareRow]) -> list[Row]:
    """A line each."""
    return [
        {
            "partition": share.partition, "owner": share.owner or "nobody", "epoch": share.epoch,
            "lag": number(share.lag), "oldest": age(share.oldest), "in hand": share.in_hand, "parked": share.parked,
            "dead": share.dead_letters,
        }
        for share in shares
    ]  # fmt: skip


def member_table() -> ui.table:
    """Empty yet."""
    columns = ["member", "serves", "handler", "heard of", "loop lag", "#in hand", "#concurrency", "partitions"]
    return table(columns, link="serves", title="Members")


def member_rows(frame: Frame, members: Sequence[MemberRow]) -> list[Row]:
    """A line each."""
    return [
        {
            "member": member.id, "serves": f"{member.topic}/{member.group}", "handler": member.handler,
            "heard of": "dead" if member.heard_ago is None else f"{age(member.heard_ago)} ago",
            "loop lag": age(member.loop_lag), "in hand": member.in_hand, "concurrency": member.concurrency,
            "partitions": " ".join(map(str, member.partitions)) or "–",
            "url": frame.url("group", member.topic, member.group),
        }
        for member in members
    ]  # fmt: skip
