"""The message browser, and the pages of messages that wait for a time. Nothing here consumes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from rsmq.control import MessageStatus
from rsmq.dashboard.html import (
    Content,
    Html,
    Row,
    about,
    block,
    button,
    choice,
    hidden,
    link,
    progress_bar,
    table,
    tag,
    text_field,
)
from rsmq.dashboard.page import Page, Visit, time_given
from rsmq.dashboard.payload import payload_block
from rsmq.dashboard.queries import MOST_SCANNED, PREVIEW, BrowsedMessage, MessageSearch, PageNotFound
from rsmq.dashboard.roles import Role
from rsmq.dashboard.waiting import MOST, WaitingMessage
from rsmq.dlq import read_fields
from rsmq.dlq.selection import not_looked_into
from rsmq.errors import ConfigError
from rsmq.inspector.text import timestamp
from rsmq.model.clock import epoch_ms
from rsmq.model.failed_attempt import FailedAttempt
from rsmq.model.stream_id import is_position
from rsmq.model.words import count, number


async def messages(visit: Visit, topic: str) -> Page:
    """The messages of a topic, newest first: by partition, key, id, time, or a field of the payload."""
    visit.check(topic)
    found = await visit.queries.topic(topic)
    wanted = search_of(visit, found.numbers)
    if wanted.id and not is_position(wanted.id):
        with suppress(PageNotFound, ConfigError):  # an id that it cannot find may be among the newest
            return await message(visit, topic, wanted.id, wanted.key or None)
    entries, is_more, unread = await visit.queries.messages(topic, wanted)
    numbers = [("", "all"), *((str(each), str(each)) for each in found.numbers)]
    bar = tag(
        "form", choice("partition", "partition", numbers, visit.given("partition")),
        text_field("key", "key", visit.given("key")), text_field("id", "id", visit.given("id")),
        text_field("where", "payload field", visit.given("where"), placeholder="shop=7"),
        text_field("until", "stored before (UTC)", visit.given("until"), type="datetime-local", step=1),
        tag("button", "show"), class_="bar",
    )  # fmt: skip
    if len(entries) == 1 and wanted.id:
        return await message(visit, topic, f"{entries[0].partition}/{entries[0].id}")
    rows = [
        Row(each.id, (
            link_of(visit, topic, each), each.message_id, each.partition, each.at, each.key[:PREVIEW],
            tag("code", each.text[:PREVIEW])))
        for each in entries
    ]  # fmt: skip
    where = f" among the newest {number(MOST_SCANNED)}" if wanted.is_filter else ""
    older = {**dict(visit.request.query_params), "before": entries[-1].id} if is_more else {}
    return Page(
        f"Messages of {topic}",
        [
            bar,
            table(("id", "message id", "#partition", "stored", "key", "payload"), rows, f"no message matches{where}"),
            unread_of(unread, "message"),
            tag("p", link("older", visit.url("messages", topic, **older))) if older else None,
            tag("p", "This consumes nothing.", class_="dim"),
        ],
        crumbs=crumbs(visit, topic)[:2],
    )  # fmt: skip


def unread_of(unread: Mapping[str, int], one: str) -> Content:
    """That not all payloads could be read in which a field was looked for."""
    text = not_looked_into(unread, one)
    return tag("p", f"{text[:1].upper()}{text[1:]}.", role="status") if text else None


def search_of(visit: Visit, numbers: Sequence[int]) -> MessageSearch:
    """The message that the fields ask for. Raises ConfigError."""
    partition, before = visit.given("partition"), visit.given("before")
    if partition and not (partition.isdecimal() and len(partition) < 6 and int(partition) in numbers):
        raise ConfigError(f"there is no partition {partition[:40]!r}: there are {numbers[0]} to {numbers[-1]}")
    if before and not is_position(before):
        raise ConfigError(f"{before[:40]!r} is not a stream id")
    until = time_given(visit.given("until"))
    start = before or ("+" if until is None else f"{epoch_ms(until)}-0")
    where = visit.given("where")
    return MessageSearch(
        int(partition) if partition else None, start, visit.given("key"), visit.given("id"),
        read_fields([where] if where else []),
    )  # fmt: skip


def crumbs(visit: Visit, topic: str) -> list[tuple[str, str]]:
    """Where a page of a topic belongs."""
    return [
        ("Overview", visit.url()), (f"topic {topic}", visit.url("topic", topic)),
        ("messages", visit.url("messages", topic)),
    ]  # fmt: skip


async def message(visit: Visit, topic: str, message_id: str, key: str | None = None) -> Page:
    """One message: where it is, for each group, and its payload. It can be cancelled, and rescheduled while it waits.

    `message_id` may also be a stream id after its partition: 3/1718000000000-0.
    """
    visit.check(topic)
    key = key or visit.request.query_params.get("key")
    entry = await visit.queries.one(topic, message_id, key)
    status: MessageStatus | None = None
    try:
        status = await visit.queries.status(topic, message_id, key)
    except ConfigError as error:  # the server's user may not run scripts: then it is shown without
        trouble = str(error)
    values: dict[str, Content] = {"where": trouble if status is None else status.text}
    if entry is not None:
        values |= {
            "message id": entry.message_id, "stored": "" if entry.id == NOT_STORED else f"{entry.at} UTC",
            "partition": str(entry.partition), "key": entry.key, "batch": batch_of(visit, status),
            "headers": tag("pre", entry.headers) if entry.headers else "",
        }  # fmt: skip
    elif status is None:
        raise PageNotFound(f"message {message_id!r} of {topic!r} is not found")
    return Page(
        f"Message {message_id}",
        [
            about(values), None if status is None else where(visit, status, {"topic": topic, "message": message_id}),
            [tag("h2", "Payload"), payload_of(visit, topic, message_id, key, entry)] if entry is not None else None,
        ],
        crumbs=crumbs(visit, topic),
    )  # fmt: skip


def batch_of(visit: Visit, status: MessageStatus | None) -> Content:
    """The batch of which it is a member."""
    return link(status.batch, visit.url("batch", status.batch)) if status is not None and status.batch else None


def payload_of(visit: Visit, topic: str, message_id: str, key: str | None, entry: BrowsedMessage) -> list[Content]:
    """The payload of a message, and the way to a new message that begins with it."""
    again = visit.url("publish", topic, message=message_id, **key_of(key))
    edit = link("publish a copy, or edit it first", again) if visit.visitor.may(Role.ACT, topic) else None
    return [payload_block(entry.data) if entry.data is not None else block(entry.text, "payload"), tag("p", edit)]


def where(visit: Visit, status: MessageStatus, subject: dict[str, str]) -> list[Content]:
    """The groups with what each has done with it, and buttons for what can still be changed."""
    topic, values = subject["topic"], subject | key_of(status.key)
    buttons: list[Content] = []
    if status.state == "delayed" or any(each.state in MOVABLE for each in status.groups):
        time = text_field("at", "to (UTC)", type="datetime-local", step=1)
        buttons += [
            visit.action("reschedule", "run now", Role.ACT, topic, values | {"when": "now"}),
            visit.action("reschedule", "reschedule", Role.ACT, topic, values | {"when": "at"}, time),
        ]
    if status.state == "delayed" or any(each.state not in OVER for each in status.groups):
        also = choice("running", "if its handler runs", (("", "let it end"), ("yes", "interrupt it")), "")
        shown = also if status.state == "stored" else None
        buttons.append(visit.action("cancel", "cancel", Role.ADMIN, topic, values, shown, danger=True))
    if status.state != "stored" and not status.groups:
        return [tag("div", buttons, class_="bar")]
    rows = [
        Row(each.group, (link(each.group, visit.url("group", topic, each.group)), each.state.replace("_", " "), (
            each.text, (" ", progress_bar(each.progress.done, f"the work of {each.group}")) if each.progress else None,
            (" · ", link("open it", visit.url("dead-letter", topic, each.group, each.letter)))
            if each.letter else None)))
        for each in status.groups
    ]  # fmt: skip
    shown = table(("group", "state", "where"), rows, "the topic has no groups")
    failed = [failed_table(each.failed, each.group) for each in status.groups]
    return [tag("div", buttons, class_="bar"), shown, failed]


def failed_table(attempts: Sequence[FailedAttempt], group: str) -> Content:
    """The attempts of a group that were followed by a retry; nothing if there are none."""
    rows = [
        Row(str(number), (each.attempt, timestamp(each.at), tag("code", each.error[:PREVIEW])))
        for number, each in enumerate(attempts)
    ]
    if not rows:
        return None
    return [tag("h2", f"Failed attempts of {group}"), table(("#attempt", "failed (UTC)", "error"), rows, "")]


NOT_STORED: Final = "0-0"
"""The stream id of an entry that is delayed."""
MOVABLE: Final = ("waiting_for_retry", "waiting_for_time")
"""States in which a message waits for a time."""
OVER: Final = ("settled", "dead", "cancelled", "not_addressed")
"""States in which there is nothing to cancel for a group."""

# -- messages that wait for a time ------------------------------------------------------------------------------------


async def delayed(visit: Visit, topic: str) -> Page:
    """The delayed messages of a topic that are due next: run them now, or move them."""
    visit.check(topic)
    found = await visit.room.waiting.delayed(await visit.queries.topic(topic))
    columns = ("", "due (UTC)", "message id", "key", "payload")
    rows = [
        Row(each.ref, (box(each.ref), timestamp(each.due), link_of(visit, topic, each.entry),
                       each.entry.key[:PREVIEW], tag("code", each.entry.text[:PREVIEW])))
        for each in found
    ]  # fmt: skip
    return Page(
        f"Delayed messages of {topic}",
        [said(found, "delayed message"),
         movable(visit, "move-delayed", topic, {"topic": topic}, columns, rows, "no message is delayed",
                 cancel="cancel-delayed")],
        crumbs=crumbs(visit, topic)[:2],
    )  # fmt: skip


async def parked(visit: Visit, topic: str, group: str) -> Page:
    """The messages of a group that wait for a retry."""
    visit.check(topic)
    found = await visit.room.waiting.parked(await visit.queries.group(topic, group), group)
    columns = ("", "due (UTC)", "message", "message id", "#attempts", "key", "payload")
    rows = [
        Row(each.ref, (
            box(each.ref), timestamp(each.due), link_of(visit, topic, each.entry), each.entry.message_id,
            each.attempts, each.entry.key[:PREVIEW], tag("code", each.entry.text[:PREVIEW])))
        for each in found
    ]  # fmt: skip
    subject = {"topic": topic, "group": group}
    return Page(
        f"Parked messages of {group} of {topic}",
        [
            said(found, "parked message"),
            movable(visit, "move-parked", topic, subject, columns, rows, "no message waits for a retry",
                    cancel="cancel-parked"),
        ],
        crumbs=[*crumbs(visit, topic)[:2], (f"group {group}", visit.url("group", topic, group))],
    )  # fmt: skip


def link_of(visit: Visit, topic: str, entry: BrowsedMessage) -> Html:
    """The page of a message: a stored one is found by its place, a delayed one by its id and key."""
    if entry.id != NOT_STORED:
        return link(entry.id, visit.url("message", topic, f"{entry.partition}/{entry.id}"))
    return link(entry.message_id, visit.url("message", topic, entry.message_id, **key_of(entry.key)))


def key_of(key: str | None) -> dict[str, str]:
    """A key that is known, for an address or a form."""
    return {"key": key} if key else {}


def said(found: Sequence[WaitingMessage], what: str) -> Html:
    """How many are shown."""
    more = ", those that are due next" if len(found) == MOST else ""
    return tag("p", f"{count(len(found), what)}{more}")


def box(ref: str) -> Html:
    """The tick of a row."""
    return tag("input", type="checkbox", name="id", value=ref, aria_label="choose")


def movable(
    visit: Visit, action: str, topic: str, subject: dict[str, str], columns: Sequence[str], rows: Sequence[Row],
    nothing: str, *, cancel: str | None = None,
) -> Html:  # fmt: skip
    """Rows to tick, with buttons that run them now, move them, or `cancel` them."""
    shown = table(columns, rows, nothing)
    if not rows or not visit.visitor.may(Role.ACT, topic):
        return shown
    buttons = tag(
        "div", select_all(), tag("button", "run now", name="when", value="now"),
        text_field("at", "to (UTC)", type="datetime-local", step=1), tag("button", "move", name="when", value="at"),
        button("cancel", danger=True, formaction=visit.url("do", cancel))
        if cancel is not None and visit.visitor.may(Role.ADMIN, topic) else None,
        class_="bar",
    )  # fmt: skip
    fields = hidden({**subject, "back": visit.back()}.items())
    return tag("form", fields, buttons, shown, method="post", action=visit.url("do", action))


def select_all() -> Html:
    """The tick of all rows; the script of the page makes it work."""
    return tag("label", tag("input", type="checkbox", data_all=True), "all", class_="tick")
