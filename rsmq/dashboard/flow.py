"""What the backlog of a group waits behind: bands, tenants, and the keys and rates with most messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from rsmq.dashboard.html import Content, Html, Row, tag
from rsmq.dashboard.page import Visit
from rsmq.inspector.obstacles import largest
from rsmq.inspector.state import MemberState
from rsmq.inspector.text import age
from rsmq.inspector.trend import GroupTrend
from rsmq.model.words import number

MOST: Final = 10
Told = Callable[[MemberState], Iterable[tuple[str, int]]]
SAID: Final = (
    "The largest that members told with their heartbeats: each member tells its three largest, and of keys only while "
    "a hundred messages or more wait for keys."
)


def flows(visit: Visit, group: GroupTrend) -> Html:
    """A table for each kind that the group has."""
    live = [each for each in group.members if each.heard_ago is not None]
    told = [*tenants(visit, live), *waits(visit, live)]
    return tag("div", bands(visit, group, live), told, tag("p", SAID, class_="dim") if told else None)


def bands(visit: Visit, group: GroupTrend, live: list[MemberState]) -> list[Html]:
    """What a group has in each band of its topic, and the slots that only this band may take."""
    if not group.bands:
        return []
    reserved = dict(largest(each.reserve for each in live))
    columns = ("band", "#partitions", "#backlog", "#unread", "#pending", "#oldest", "#dead", "#reserved slots")
    rows = [
        Row(each.name, (
            each.name, each.partitions, number(each.unread + each.pending), number(each.unread), number(each.pending),
            age(each.oldest), number(each.dead_letters), reserved.get(each.name, 0)))
        for each in group.bands
    ]  # fmt: skip
    return [tag("h2", "Bands"), visit.live.table("bands", columns, rows, "")]


def tenants(visit: Visit, live: list[MemberState]) -> list[Html]:
    """The tenants with most messages that have not started, with their weights, and how many of these wait for a rate
    of the same name."""
    found = top(live, lambda each: each.waiting_by_tenant)
    if not found:
        return []
    weights = {name: weight for each in live for name, weight in each.weights}
    rates = dict(largest(each.waiting_for_rate_by for each in live))
    rows = [
        Row(name, (name or "none", number(many), f"{weights.get(name, 1):g}", number(rates.get(name, 0))))
        for name, many in found
    ]  # fmt: skip
    columns = ("tenant", "#not started", "#weight", "#wait for a rate")
    return [tag("h2", "Tenants"), visit.live.table("tenants", columns, rows, "")]


def waits(visit: Visit, live: list[MemberState]) -> list[Html]:
    """The keys and names of rates with most messages behind them."""
    kinds: tuple[tuple[str, Told], ...] = (
        ("key", lambda each: each.waiting_for_key_by), ("rate", lambda each: each.waiting_for_rate_by),
    )  # fmt: skip
    rows = [
        Row(f"{kind} {name}", (kind, name or "of the handler", number(many), member_names(live, told, name)))
        for kind, told in kinds
        for name, many in top(live, told)
    ]
    if not rows:
        return []
    columns = ("waits for a", "name", "#messages", "members")
    return [tag("h2", "Waiting"), visit.live.table("waits", columns, rows, "")]


def top(live: list[MemberState], told: Told) -> list[tuple[str, int]]:
    """The largest, over all members."""
    return largest(map(told, live))[:MOST]


def member_names(live: list[MemberState], told: Told, name: str) -> Content:
    """The members that tell of a name."""
    return ", ".join(each.id for each in live if name in dict(told(each)))
