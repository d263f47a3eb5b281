"""The message browser, and the pages of messages that wait for a time. Nothing here consumes anything."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from rsmq.control import MessageStatus
from rsmq.dashboard.html import Content, Html, Row, about, block, button, choice, hidden, link, table, tag, text_field
from rsmq.dashboard.page import Context, Page, time_given
from rsmq.dashboard.queries import MOST_SCANNED, PREVIEW, Entry, NotFound, Search
from rsmq.dashboard.roles import Role
from rsmq.dashboard.waiting import MOST, Waiting
from rsmq.dlq import read_fields
from rsmq.errors import ConfigError
from rsmq.inspector.text import timestamp
from rsmq.model.clock import epoch_ms
from rsmq.model.failed_attempt import FailedAttempt
from rsmq.model.stream_id import STREAM_ID
from rsmq.model.words import count, number


async def messages(context: Context, topic: str) -> Page:
    """The messages of a topic, newest first: by partition, key, id, time, or a field of the payload."""
    context.check(topic)
    found = await context.queries.topic(topic)
    wanted = search_of(context, found.partitions)
    if wanted.id and not STREAM_ID.fullmatch(wanted.id):
        with suppress(NotFound, ConfigError):  # an id that it cannot find may be among the newest
            return await message(context, topic, wanted.id, wanted.key or None)
    entries, is_more = await context.queries.messages(topic, wanted)
    numbers = [("", "all"), *((str(each), str(each)) for each in range(found.partitions))]
    bar = tag(
        "form", choice("partition", "partition", numbers, context.given("partition")),
        text_field("key", "key", context.given("key")), text_field("id", "id", context.given("id")),
        text_field("where", "payload field", context.given("where"), placeholder="shop=7"),
        text_field("until", "stored before (UTC)", context.given("until"), type="datetime-local", step=1),
        tag("button", "show"), class_="bar",
    )  # fmt: skip
    if len(entries) == 1 and wanted.id:
        return await message(context, topic, f"{entries[0].partition}/{entries[0].id}")
    rows = [
        Row(each.id, (
            link_of(context, topic, each), each.message_id, each.partition, each.at, each.key[:PREVIEW],
            tag("code", each.text[:PREVIEW])))
        for each in entries
    ]  # fmt: skip
    where = f" among the newest {number(MOST_SCANNED)}" if wanted.is_filter else ""
    older = {**dict(context.request.query_params), "before": entries[-1].id} if is_more else {}
    return Page(
        f"Messages of {topic}",
        [
            bar,
            table(("id", "message id", "#partition", "stored", "key", "payload"), rows, f"no message matches{where}"),
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


async def message(context: Context, topic: str, message_id: str, key: str | None = None) -> Page:
    """One message: where it is, for each group, and its payload. It can be cancelled, and rescheduled while it waits.

    `message_id` may also be a stream id after its partition: 3/1718000000000-0.
    """
    context.check(topic)
    key = key or context.request.query_params.get("key")
    entry = await context.queries.one(topic, message_id, key)
    status: MessageStatus | None = None
    try:
        status = await context.queries.status(topic, message_id, key)
    except ConfigError as error:  # the server's user may not run scripts: then it is shown without
        trouble = str(error)
    values: dict[str, Content] = {"where": trouble if status is None else status.text}
    if entry is not None:
        values |= {
            "message id": entry.message_id, "stored": "" if entry.id == NOT_STORED else f"{entry.at} UTC",
            "partition": str(entry.partition), "key": entry.key,
            "headers": tag("pre", entry.headers) if entry.headers else "",
        }  # fmt: skip
    elif status is None:
        raise NotFound(f"message {message_id!r} of {topic!r} is not found")
    return Page(
        f"Message {message_id}",
        [
            about(values), None if status is None else where(context, status, {"topic": topic, "message": message_id}),
            [tag("h2", "Payload"), block(entry.text, "payload")] if entry is not None else None,
        ],
        crumbs=crumbs(context, topic),
    )  # fmt: skip


def where(context: Context, status: MessageStatus, place: dict[str, str]) -> list[Content]:
    """The groups with what each has done with it, and buttons for what can still be changed."""
    topic, values = place["topic"], place | key_of(status.key)
    buttons: list[Content] = []
    if status.state == "delayed" or any(each.state == "parked" for each in status.groups):
        time = text_field("at", "to (UTC)", type="datetime-local", step=1)
        buttons += [
            context.action("reschedule", "run now", Role.ACT, topic, values | {"when": "now"}),
            context.action("reschedule", "reschedule", Role.ACT, topic, values | {"when": "at"}, time),
        ]
    if status.state == "delayed" or any(each.state in OPEN for each in status.groups):
        also = choice("running", "if its handler runs", (("", "let it end"), ("yes", "interrupt it")), "")
        shown = also if status.state == "stored" else None
        buttons.append(context.action("cancel", "cancel", Role.ADMIN, topic, values, shown, danger=True))
    if status.state != "stored" and not status.groups:
        return [tag("div", buttons, class_="bar")]
    rows = [
        Row(each.group, (link(each.group, context.url("group", topic, each.group)), each.state, (
            each.text, (" · ", link("open it", context.url("dead-letter", topic, each.group, each.letter)))
            if each.letter else None)))
        for each in status.groups
    ]  # fmt: skip
    shown = table(("group", "state", "where"), rows, "the topic has no groups")
    failed = [failed_table(each.failed, each.group) for each in status.groups]
    return [tag("div", buttons, class_="bar"), shown, failed]


def failed_table(attempts: Sequence[FailedAttempt], group: str) -> Content:
    """The attempts of a group that were followed by a retry; nothing if there are none."""
    rows = [
        Row(str(place), (each.attempt, timestamp(each.at), tag("code", each.error[:PREVIEW])))
        for place, each in enumerate(attempts)
    ]
    if not rows:
        return None
    return [tag("h2", f"Failed attempts of {group}"), table(("#attempt", "failed (UTC)", "error"), rows, "")]


NOT_STORED: Final = "0-0"
"""The stream id of an entry that is delayed."""
OPEN: Final = ("undelivered", "waiting", "in_flight", "parked")
"""The states in which a message can be cancelled for a group."""

# -- messages that wait for a time ------------------------------------------------------------------------------------


async def delayed(context: Context, topic: str) -> Page:
    """The delayed messages of a topic that are due next: run them now, or move them."""
    context.check(topic)
    found = await context.room.waiting.delayed(await context.queries.topic(topic))
    columns = ("", "due (UTC)", "message id", "key", "payload")
    rows = [
        Row(each.ref, (box(each.ref), timestamp(each.due), link_of(context, topic, each.entry),
                       each.entry.key[:PREVIEW], tag("code", each.entry.text[:PREVIEW])))
        for each in found
    ]  # fmt: skip
    return Page(
        f"Delayed messages of {topic}",
        [said(found, "delayed message"),
         movable(context, "move-delayed", topic, {"topic": topic}, columns, rows, "no message is delayed",
                 cancel="cancel-delayed")],
        crumbs=crumbs(context, topic)[:2],
    )  # fmt: skip


async def parked(context: Context, topic: str, group: str) -> Page:
    """The messages of a group that wait for a retry."""
    context.check(topic)
    found = await context.room.waiting.parked(await context.queries.group(topic, group), group)
    columns = ("", "due (UTC)", "message", "message id", "#attempts", "key", "payload")
    rows = [
        Row(each.ref, (
            box(each.ref), timestamp(each.due), link_of(context, topic, each.entry), each.entry.message_id,
            each.attempts, each.entry.key[:PREVIEW], tag("code", each.entry.text[:PREVIEW])))
        for each in found
    ]  # fmt: skip
    place = {"topic": topic, "group": group}
    return Page(
        f"Parked messages of {group} of {topic}",
        [
            said(found, "parked message"),
            movable(context, "move-parked", topic, place, columns, rows, "no message waits for a retry",
                    cancel="cancel-parked"),
        ],
        crumbs=[*crumbs(context, topic)[:2], (f"group {group}", context.url("group", topic, group))],
    )  # fmt: skip


def link_of(context: Context, topic: str, entry: Entry) -> Html:
    """The page of a message: a stored one is found by its place, a delayed one by its id and key."""
    if entry.id != NOT_STORED:
        return link(entry.id, context.url("message", topic, f"{entry.partition}/{entry.id}"))
    return link(entry.message_id, context.url("message", topic, entry.message_id, **key_of(entry.key)))


def key_of(key: str | None) -> dict[str, str]:
    """A key that is known, for an address or a form."""
    return {"key": key} if key else {}


def said(found: Sequence[Waiting], what: str) -> Html:
    """How many are shown."""
    more = ", those that are due next" if len(found) == MOST else ""
    return tag("p", f"{count(len(found), what)}{more}")


def box(ref: str) -> Html:
    """The tick of a row."""
    return tag("input", type="checkbox", name="id", value=ref, aria_label="choose")


def movable(
    context: Context, action: str, topic: str, place: dict[str, str], columns: Sequence[str], rows: Sequence[Row],
    nothing: str, *, cancel: str | None = None,
) -> Html:  # fmt: skip
    """Rows to tick, with buttons that run them now, move them, or `cancel` them."""
    shown = table(columns, rows, nothing)
    if not rows or not context.visitor.may(Role.ACT, topic):
        return shown
    buttons = tag(
        "div", select_all(), tag("button", "run now", name="when", value="now"),
        text_field("at", "to (UTC)", type="datetime-local", step=1), tag("button", "move", name="when", value="at"),
        button("cancel", danger=True, formaction=context.url("do", cancel))
        if cancel is not None and context.visitor.may(Role.ADMIN, topic) else None,
        class_="bar",
    )  # fmt: skip
    fields = hidden({**place, "back": context.back()}.items())
    return tag("form", fields, buttons, shown, method="post", action=context.url("do", action))


def select_all() -> Html:
    """The tick of all rows; the script of the page makes it work."""
    return tag("label", tag("input", type="checkbox", data_all=True), "all", class_="tick")
