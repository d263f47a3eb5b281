"""The pages of dead letters: by group, by error, one by one. None can be edited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rsmq.dashboard.actions import selection_of
from rsmq.dashboard.html import Content, Html, Row, about, block, hidden, link, table, tag, text_field
from rsmq.dashboard.message import box, failed_table, select_all, unread_of
from rsmq.dashboard.page import Page, Visit
from rsmq.dashboard.payload import payload_block
from rsmq.dashboard.queries import MOST_LETTERS, PREVIEW
from rsmq.dashboard.roles import Role
from rsmq.dlq import DeadLetter
from rsmq.model.words import count, number

FIELDS = ("reason", "error", "key", "where", "since", "until")


async def dead_letter_groups(visit: Visit) -> Page:
    """The number of dead letters of each group."""
    board = await visit.board()
    rows = [
        Row(f"{each.topic}/{each.name}", (
            link(each.name, visit.url("dead-letters", each.topic, each.name)), each.topic, number(each.dead_letters)))
        for each in sorted(board.groups, key=lambda each: -each.dead_letters)
        if each.dead_letters
    ]  # fmt: skip
    columns = ("group", "topic", "#dead letters")
    return Page("Dead letters", [visit.live.table("dead", columns, rows, "there are no dead letters")], is_live=True)


async def dead_letters(visit: Visit, topic: str, group: str) -> Page:
    """Those of one group that match the fields, and how many there are of each error."""
    visit.check(topic)
    await visit.queries.group(topic, group)
    letters, is_more, unread = await visit.queries.dead_letters(topic, group, selection_of(visit.given))
    more = f", the oldest {MOST_LETTERS} are shown" if is_more else ""
    given = {name: visit.given(name) for name in FIELDS if visit.given(name)}
    return Page(
        f"Dead letters of {group} of {topic}",
        [
            filters(visit), tag("p", f"{count(len(letters), 'dead letter')}{more}"),
            unread_of(unread, "dead letter"),
            errors(visit, topic, group, letters, given), rows_of(visit, topic, group, letters, given),
        ],
        crumbs=[("Dead letters", visit.url("dead-letters")), (f"group {group}", visit.url("group", topic, group))],
    )  # fmt: skip


def filters(visit: Visit) -> Html:
    """The fields; Enter applies them."""
    return tag(
        "form", text_field("reason", "reason", visit.given("reason")),
        text_field("error", "error contains", visit.given("error")),
        text_field("key", "key", visit.given("key")),
        text_field("where", "payload field", visit.given("where"), placeholder="shop=7"),
        text_field("since", "died since (UTC)", visit.given("since"), type="datetime-local", step=1),
        text_field("until", "died before (UTC)", visit.given("until"), type="datetime-local", step=1),
        tag("button", "show"), class_="bar",
    )  # fmt: skip


def errors(visit: Visit, topic: str, group: str, letters: Sequence[DeadLetter], given: dict[str, str]) -> Content:
    """The letters that are shown by their error, the most frequent one first, each with one traceback."""
    found: dict[tuple[str, str], list[DeadLetter]] = defaultdict(list)
    for letter in letters:
        found[letter.reason, kind_of(letter.error)].append(letter)
    if len(letters) < 2:
        return None
    made = []
    for (reason, kind), same in sorted(found.items(), key=lambda each: -len(each[1])):
        only = visit.url("dead-letters", topic, group, **{**given, "reason": reason, "error": kind})
        head = tag("summary", f"{count(len(same), 'dead letter')} · {reason} · {kind[:PREVIEW]}")
        times = f"from {same[0].at:%Y-%m-%d %H:%M:%S} to {same[-1].at:%Y-%m-%d %H:%M:%S} UTC"
        trace = block(same[-1].traceback, "traceback") if same[-1].traceback else None
        made.append(tag("details", head, tag("p", times, " · ", link("only these", only)), trace))
    return tag("section", tag("h2", "By error"), made)


def kind_of(error: str) -> str:
    """The sign of letters with the same cause: the type of the error and the words before the first value."""
    text = error.partition("\n")[0]
    for at, char in enumerate(text):
        if char.isdigit() or char in "'\"<{[":
            return text[:at].rstrip(" #:(") or text
    return text


def rows_of(visit: Visit, topic: str, group: str, letters: Sequence[DeadLetter], given: dict[str, str]) -> Content:
    """The table, with ticks and buttons for those who may act."""
    may_act = visit.visitor.may(Role.ACT, topic)
    columns = ("id", "died (UTC)", "message id", "reason", "#attempts", "key", "error")
    rows = [
        Row(each.id, (
            *((box(each.id),) if may_act else ()), link(each.id, visit.url("dead-letter", topic, group, each.id)),
            f"{each.at:%Y-%m-%d %H:%M:%S}", each.message_id, each.reason, each.attempts, (each.key or "")[:PREVIEW],
            tag("code", each.error[:PREVIEW])))
        for each in letters
    ]  # fmt: skip
    shown = table(("", *columns) if may_act else columns, rows, "there are no dead letters that match")
    if not may_act:
        return shown
    subject = {"topic": topic, "group": group}
    bar = tag(
        "div", select_all(), tag("button", "replay the ticked"),
        text_field("rate", "at most a second", type="number", min=0, step="any", placeholder="no limit"), class_="bar",
    )  # fmt: skip
    url = visit.url("do", "replay")
    ticked = tag("form", hidden({**subject, "back": visit.back()}.items()), bar, shown, method="post", action=url)
    ids = hidden(("id", each.id) for each in letters)
    others = [
        visit.action("replay", f"replay all {len(letters)} shown", Role.ACT, topic, subject, ids) if letters else None,
        visit.action("replay-matching", "replay all that match", Role.ACT, topic, {**subject, **given}),
        visit.action("purge", "purge the group's", Role.ADMIN, topic, subject, danger=True),
    ]
    return [tag("div", others, class_="bar"), ticked] if letters else [shown, tag("div", others[2:], class_="bar")]


async def dead_letter(visit: Visit, topic: str, group: str, letter: str) -> Page:
    """All of one."""
    visit.check(topic)
    found = await visit.queries.dead_letter(topic, group, letter)
    headers = "\n".join(f"{name}: {value}" for name, value in found.headers.items())
    values = {
        "reason": found.reason, "error": found.error, "attempts": str(found.attempts),
        "died": f"{found.at:%Y-%m-%d %H:%M:%S} UTC", "origin": found.origin, "member": found.member,
        "message id": found.message_id, "key": found.key or "", "headers": tag("pre", headers) if headers else "",
    }  # fmt: skip
    back = visit.url("dead-letters", topic, group)
    subject = {"topic": topic, "group": group, "id": found.id}
    again = visit.url("publish", topic, group=group, letter=found.id)
    may_publish = found.data is not None and visit.visitor.may(Role.ACT, topic)
    return Page(
        f"Dead letter {found.id}",
        [
            visit.action("replay", "replay", Role.ACT, topic, subject), about(values),
            failed_table(found.history, group),
            [tag("h2", "Traceback"), block(found.traceback, "traceback")] if found.traceback else None,
            tag("h2", "Payload"),
            block(f"({found.sealed})", "payload") if found.sealed else payload_block(found.data),
            tag("p", link("publish a copy as a new message, or edit it first", again)) if may_publish else None,
        ],
        crumbs=[("Dead letters", visit.url("dead-letters")), (f"{group} of {topic}", back)],
    )  # fmt: skip
