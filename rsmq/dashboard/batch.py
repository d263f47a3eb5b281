"""The pages of batches: all of them with a bar of progress, and one with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rsmq.control import BatchStatus
from rsmq.control.batches import CALLED
from rsmq.dashboard.html import Content, Html, Row, about, link, progress_bar, table, tag
from rsmq.dashboard.page import Page, Visit, joined
from rsmq.dashboard.queries import PageNotFound
from rsmq.dashboard.roles import Role
from rsmq.errors import ConfigError
from rsmq.inspector.text import timestamp
from rsmq.model.progress import MessageProgress
from rsmq.model.words import count, number

MOST_READ: Final = 1000
MOST_SHOWN: Final = 100
MOST_TOLD: Final = 20
MOST_LIVE: Final = 50
"""Batches of a page that is sent again each second."""
COLUMNS: Final = (
    "batch", "state", "ended", "#members", "#done", "#failed", "#cancelled", "#expired", "#missing", "group", "started",
)  # fmt: skip


async def batches(visit: Visit) -> Page:
    """The batches that the visitor sees: those that are not over first, then the newest."""
    found, total = await visit.queries.batches.matching(visit.given("q"), MOST_READ)
    seen = sorted((each for each in found if sees(visit, each)), key=order)
    rows = [row_of(visit, each) for each in seen[:MOST_SHOWN]]
    rest = total - MOST_READ + max(0, len(seen) - MOST_SHOWN) if total > MOST_READ else len(seen) - MOST_SHOWN
    more = (
        tag("p", f"{count(rest, 'more batch is', 'more batches are')} not shown: filter by name") if rest > 0 else None
    )
    shown = visit.live.table("batches", COLUMNS, rows, "there are no batches")
    return Page("Batches", [visit.search(), shown, more], is_live=total <= MOST_LIVE)


def sees(visit: Visit, batch: BatchStatus) -> bool:
    """Whether the visitor sees all topics of a batch; of one that has none yet: whether all topics."""
    return all(map(visit.sees, batch.topics)) if batch.topics else visit.visitor.sees(None)


def order(batch: BatchStatus) -> tuple[bool, float]:
    """Those that are not over first, then the newest."""
    return batch.state in CALLED, -batch.started.timestamp()


def row_of(visit: Visit, batch: BatchStatus) -> Row:
    """A row of the table."""
    return Row(batch.id, (
        link(batch.name, visit.url("batch", batch.name)), batch.state, bar(batch), number(batch.total),
        number(batch.done), number(batch.failed), number(batch.cancelled), number(batch.expired),
        number(batch.missing), batch.group, timestamp(batch.started),
    ))  # fmt: skip


def bar(batch: BatchStatus) -> Html:
    """How many of the members have ended."""
    part = batch.left / batch.total if batch.total else float(batch.ended is not None)
    return progress_bar(part, f"{batch.name} have ended")


async def batch(visit: Visit, name: str) -> Page:
    """One batch: how its members have ended, its groups, and its times. It can be cancelled."""
    found = await one(visit, name)
    groups = [link(f"{found.group} of {topic}", visit.url("group", topic, found.group)) for topic in found.topics]
    failed: Content = number(found.failed)
    if found.failed:
        letters = [
            link(f"dead letters of {topic}", visit.url("dead-letters", topic, found.group)) for topic in found.topics
        ]
        failed = [number(found.failed), " (", joined(letters, ", "), ")"]
    values: dict[str, Content] = {
        "state": STATES[found.state], "ended": bar(found), "members": number(found.total), "done": number(found.done),
        "failed": failed, "cancelled": number(found.cancelled), "expired": number(found.expired),
        "missing": f"{number(found.missing)}: not ended yet, or lost" if found.missing else "0",
        "handled by": joined(groups, ", ") if groups else f"{found.group}, no member so far",
        "started": timestamp(found.started), "expires": timestamp(found.expires),
        "callback": timestamp(found.ended) or "not yet",
    }  # fmt: skip
    told = [] if found.state in CALLED else await visit.queries.batches.progress(found)
    return Page(
        f"Batch {found.name}",
        [
            visit.live.part("batch", about(values)),
            visit.live.part("ends", cancel_button(visit, found)),
            visit.live.part("told", progress_table(told) if told else None),
        ],
        is_live=True,
        crumbs=[("Batches", visit.url("batches"))],
    )


def progress_table(told: Sequence[MessageProgress]) -> list[Content]:
    """What the handlers of members have said of them, the latest first."""
    rows = [
        Row(str(at), (timestamp(each.at), progress_bar(each.done, "a member"), each.text))
        for at, each in enumerate(told[:MOST_TOLD])
    ]
    rest = len(told) - MOST_TOLD
    more = tag("p", f"and {number(rest)} more", class_="dim") if rest > 0 else None
    return [tag("h2", "Members that run"), table(("said (UTC)", "done", "what"), rows, ""), more]


STATES: Final = {
    "open": "open: its publisher has not closed it",
    "closed": "closed: members are under way",
    "cancelled": "cancelled: what has not started does not start",
    "complete": "complete: all members have ended",
    "success": "success: all members are done",
    "abandoned": "abandoned: it expired before all members had ended",
}


async def one(visit: Visit, name: str) -> BatchStatus:
    """A batch that the visitor sees. Raises PageNotFound."""
    try:
        found = await visit.queries.batches.find(name)
    except ConfigError:  # no batch can have this name
        found = None
    if found is None or not sees(visit, found):
        raise PageNotFound(f"there is no batch {name!r}: it may have been forgotten")
    return found


def may_cancel(visit: Visit, batch: BatchStatus) -> bool:
    """Whether the visitor may cancel messages of all its topics."""
    topics = batch.topics or (None,)
    return all(visit.visitor.may(Role.ADMIN, topic) for topic in topics)


def cancel_button(visit: Visit, batch: BatchStatus) -> Content:
    """The button that cancels it, while there is something to cancel."""
    if batch.state in (*CALLED, "cancelled") or not may_cancel(visit, batch):
        return None
    topic = batch.topics[0] if batch.topics else None
    return visit.action("cancel-batch", "cancel", Role.ADMIN, topic, {"batch": batch.name}, danger=True)
