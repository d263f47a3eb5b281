"""The message browser, and the pages of messages that wait for a time. Nothing here consumes anything."""

from __future__ import annotations

from collections.abc import Sequence

from rsmq.dashboard.html import Content, Html, Row, about, block, choice, hidden, link, table, tag, text_field
from rsmq.dashboard.page import Context, Page, time_given
from rsmq.dashboard.queries import MOST_SCANNED, PREVIEW, Entry, Search
from rsmq.dashboard.roles import Role
from rsmq.dashboard.waiting import MOST, Waiting
from rsmq.dlq import read_fields
from rsmq.errors import ConfigError
from rsmq.inspector.text import timestamp
from rsmq.model.clock import epoch_ms
from rsmq.model.words import count, number
from rsmq.redis.streams import STREAM_ID


async def messages(context: Context, topic: str) -> Page:
    """The messages of a topic, newest first: by partition, key, id, time, or a field of the payload."""
    context.check(topic)
    found = await context.queries.topic(topic)
    wanted = search_of(context, found.partitions)
    entries, is_more = await context.queries.messages(topic, wanted)
    numbers = [("", "all"), *((str(each), str(each)) for each in range(found.partitions))]
    bar = tag(
        "form", choice("partition", "partition", numbers, context.given("partition")),
        text_field("key", "key", context.given("key")), text_field("id", "id", context.given("id")),
        text_field("where", "payload field", context.given("where"), placeholder="shop=7"),
        text_field("until", "stored before (UTC)", context.given("until"), type="datetime-local", step=1),
        tag("button", "show"), class_="bar",
    )  # fmt: skip
    if len(entries) == 1 and context.given("id"):
        return Page(f"Message {entries[0].id}", [whole(entries[0])], crumbs=crumbs(context, topic))
    rows = [
        Row(each.id, (
            link(each.id, context.url("messages", topic, partition=str(each.partition), id=each.id)), each.partition,
            each.at, each.key[:PREVIEW], tag("code", each.text[:PREVIEW])))
        for each in entries
    ]  # fmt: skip
    where = f" among the newest {number(MOST_SCANNED)}" if wanted.is_filter else ""
    older = {**dict(context.request.query_params), "before": entries[-1].id} if is_more else {}
    return Page(
        f"Messages of {topic}",
        [
            bar, table(("id", "#partition", "stored", "key", "payload"), rows, f"no message matches{where}"),
            tag("p", link("older", context.url("messages", topic, **older))) if older else None,
            tag("p", "This consumes nothing.", class_="dim"),
        ],
        crumbs=crumbs(context, topic)[:2],
    )  # fmt: skip


def search_of(context: Context, partitions: int) -> Search:
    """What the fields ask for. Raises ConfigError."""
    partition, before = context.given("partition"), context.given("before")
    if partition and not (partition.isdecimal() and len(partition) < 6 and int(partition) < partitions):
        raise ConfigError(f"there is no partition {partition[:40]!r}: there are {partitions}, from 0")
    if before and not STREAM_ID.fullmatch(before):
        raise ConfigError(f"{before[:40]!r} is not a stream id")
    until = time_given(context.given("until"))
    start = before or ("+" if until is None else f"{epoch_ms(until)}-0")
    where = context.given("where")
    return Search(
        int(partition) if partition else None, start, context.given("key"), context.given("id"),
        read_fields([where] if where else []),
    )  # fmt: skip


def crumbs(context: Context, topic: str) -> list[tuple[str, str]]:
    """Where a page of a topic belongs."""
    return [
        ("Overview", context.url()), (f"topic {topic}", context.url("topic", topic)),
        ("messages", context.url("messages", topic)),
    ]  # fmt: skip


def whole(entry: Entry) -> list[Content]:
    """All of one message."""
    values = {
        "id": entry.id, "message id": entry.message_id, "stored": f"{entry.at} UTC", "partition": str(entry.partition),
        "key": entry.key, "headers": tag("pre", entry.headers) if entry.headers else "",
    }  # fmt: skip
    return [about(values), block(entry.text, "payload")]


# -- messages that wait for a time ------------------------------------------------------------------------------------


async def delayed(context: Context, topic: str) -> Page:
    """The delayed messages of a topic that are due next: run them now, or move them."""
    context.check(topic)
    found = await context.room.waiting.delayed(await context.queries.topic(topic))
    columns = ("", "due (UTC)", "message id", "key", "payload")
    rows = [Row(each.ref, (box(each.ref), timestamp(each.due), each.entry.message_id, each.entry.key[:PREVIEW],
                           tag("code", each.entry.text[:PREVIEW]))) for each in found]  # fmt: skip
    return Page(
        f"Delayed messages of {topic}",
        [said(found, "delayed message"),
         movable(context, "move-delayed", topic, {"topic": topic}, columns, rows, "no message is delayed")],
        crumbs=crumbs(context, topic)[:2],
    )  # fmt: skip


async def parked(context: Context, topic: str, group: str) -> Page:
    """The messages of a group that wait for a retry."""
    context.check(topic)
    found = await context.room.waiting.parked(await context.queries.group(topic, group), group)
    columns = ("", "due (UTC)", "message", "#attempts", "key", "payload")
    rows = [
        Row(each.ref, (
            tag("span", "keeps its key", title="its member has the timer, so it cannot be moved", class_="dim")
            if each.holds_key else box(each.ref),
            timestamp(each.due), link(each.entry.id, context.url("messages", topic, id=each.entry.id)), each.attempts,
            each.entry.key[:PREVIEW], tag("code", each.entry.text[:PREVIEW])))
        for each in found
    ]  # fmt: skip
    place = {"topic": topic, "group": group}
    return Page(
        f"Parked messages of {group} of {topic}",
        [
            said(found, "parked message"),
            movable(context, "move-parked", topic, place, columns, rows, "no message waits for a retry"),
            tag("p", "Run now: the group looks every ten seconds. A message that keeps its key is retried when it is "
                "due, because its member has the timer.", class_="dim"),
        ],
        crumbs=[*crumbs(context, topic)[:2], (f"group {group}", context.url("group", topic, group))],
    )  # fmt: skip


def said(found: Sequence[Waiting], what: str) -> Html:
    """How many are shown."""
    more = ", those that are due next" if len(found) == MOST else ""
    return tag("p", f"{count(len(found), what)}{more}")


def box(ref: str) -> Html:
    """The tick of a row."""
    return tag("input", type="checkbox", name="id", value=ref, aria_label="choose")


def movable(
    context: Context, action: str, topic: str, place: dict[str, str], columns: Sequence[str], rows: Sequence[Row],
    nothing: str,
) -> Html:  # fmt: skip
    """Rows to tick, with buttons that run them now or move them."""
    shown = table(columns, rows, nothing)
    if not rows or not context.visitor.may(Role.ACT, topic):
        return shown
    buttons = tag(
        "div", select_all(), tag("button", "run now", name="when", value="now"),
        text_field("at", "to (UTC)", type="datetime-local", step=1), tag("button", "move", name="when", value="at"),
        class_="bar",
    )  # fmt: skip
    fields = hidden({**place, "back": context.back()}.items())
    return tag("form", fields, buttons, shown, method="post", action=context.url("do", action))


def select_all() -> Html:
    """The tick of all rows; the script of the page makes it work."""
    return tag("label", tag("input", type="checkbox", data_all=True), "all", class_="tick")
