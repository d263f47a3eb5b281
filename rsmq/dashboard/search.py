"""The search of every page: an id, a key or a name, over all topics that the visitor sees."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import anyio

from rsmq.dashboard.html import Content, Row, link, table, tag
from rsmq.dashboard.message import link_of
from rsmq.dashboard.page import Page, Visit
from rsmq.dashboard.queries import PREVIEW, BrowsedMessage, MessageSearch, PageNotFound
from rsmq.errors import ConfigError
from rsmq.inspector.trend import Board
from rsmq.model.words import count, number

SECONDS: Final = 5.0
"""A search ends after this time, and says what it has not looked at."""
SCANNED: Final = 2000
"""The newest messages of a topic, among which a key is looked for."""
MOST_NAMES: Final = 20


async def search(visit: Visit) -> Page:
    """What has this id or key, or this in its name."""
    wanted = visit.given("find")
    if not wanted:
        return Page("Search", [tag("p", "Write a message id, a key, or a part of a name into the field above.")])
    board = await visit.board()
    topics = [each for each in await visit.queries.topics.names() if visit.sees(each)]  # a board may be older
    names = named(visit, topics, board, wanted.casefold())
    found, left = await messages_of(visit, topics, wanted)
    if not found:
        names += await traces(visit, topics, wanted)
    if visit.visitor.sees(None):
        names += await clients(visit, wanted)
    rows = [
        Row(f"{topic}/{each.partition}/{each.id}", (
            link(topic, visit.url("topic", topic)), link_of(visit, topic, each), each.message_id, each.at,
            each.key[:PREVIEW], tag("code", each.text[:PREVIEW])))
        for topic, each in found
    ]  # fmt: skip
    columns = ("topic", "stream id", "message id", "stored (UTC)", "key", "payload")
    nothing = f"no message has this id, and none of the newest {number(SCANNED)} of each topic has this key"
    body: list[Content] = [tag("h2", "Messages"), table(columns, rows, nothing)]
    if left:
        shown = ", ".join(left[:MOST_NAMES])
        body.append(
            tag("p", f"Not looked at, because time was up: {count(len(left), 'topic')}: {shown}", role="status")
        )
    body += [tag("h2", "Names"), table(("what", "name"), names, "no name contains this")]
    return Page(f"Search for {wanted[:PREVIEW]}", body)


async def messages_of(
    visit: Visit, topics: Sequence[str], wanted: str
) -> tuple[list[tuple[str, BrowsedMessage]], list[str]]:
    """The messages with this id or key, and the topics for which there was no time."""
    found, left = list[tuple[str, BrowsedMessage]](), list(topics)
    with anyio.move_on_after(SECONDS):
        for topic in topics:
            with suppress(PageNotFound, ConfigError):  # deleted meanwhile, or its user may run no script
                one = await visit.queries.one(topic, wanted)
                if one is not None:
                    found.append((topic, one))
            with suppress(PageNotFound, ConfigError):
                some = await visit.queries.messages(topic, MessageSearch(key=wanted), SCANNED)
                found += [(topic, each) for each in some.entries if (topic, each) not in found]
            left.remove(topic)
    return found, left


async def traces(visit: Visit, topics: Sequence[str], wanted: str) -> list[Row]:
    """A message with this id that is in no stream any more: what is left of it, such as a dead letter."""
    rows = list[Row]()
    with anyio.move_on_after(SECONDS):
        for topic in topics:
            with suppress(PageNotFound, ConfigError):
                status = await visit.queries.status(topic, wanted)
                shown = link(f"{wanted} of {topic}", visit.url("message", topic, wanted))
                rows.append(Row(f"message {topic}", ("message", (shown, f": {status.text}"))))
    return rows


def named(visit: Visit, topics: Sequence[str], board: Board, wanted: str) -> list[Row]:
    """Topics, groups and processes with this in their names."""
    rows = [
        Row(f"topic {each}", ("topic", link(each, visit.url("topic", each))))
        for each in topics
        if wanted in each.casefold()
    ]
    rows += [
        Row(f"group {each.topic}/{each.name}",
            ("group", link(f"{each.topic}/{each.name}", visit.url("group", each.topic, each.name))))
        for each in board.groups
        if wanted in each.name.casefold()
    ]  # fmt: skip
    processes = sorted({each.id for each in board.members if wanted in each.id.casefold()})
    rows += [Row(f"process {each}", ("process", link(each, visit.url("process", each)))) for each in processes]
    return rows[:MOST_NAMES]


async def clients(visit: Visit, wanted: str) -> list[Row]:
    """The device and the MQTT client with exactly this id."""
    rows = list[Row]()
    if await visit.queries.device(wanted) is not None:
        rows.append(Row("device", ("device", link(wanted, visit.url("device", wanted)))))
    with suppress(ConfigError):
        if await visit.queries.mqtt.find(wanted) is not None:
            rows.append(Row("client", ("MQTT client", link(wanted, visit.url("connection", wanted)))))
    return rows
