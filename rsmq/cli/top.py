"""`rsmq top`: everything at a glance, again and again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.live import Live

from rsmq.cli.option import AnyTopic, Json, Url
from rsmq.cli.picture import draw
from rsmq.cli.printer import PIPED_WIDTH, dump, printable
from rsmq.cli.session import Session, connected
from rsmq.cli.value import parse_span
from rsmq.connect import redact
from rsmq.trend import Board, compare

LEAST = timedelta(milliseconds=100)
MOST_SHARES = 16
"""So many partitions are shown of all groups together, unless one topic was asked for."""

Show = Callable[[Board, str], None]


def top(
    topic: AnyTopic = None,
    every: Annotated[
        timedelta, typer.Option(parser=parse_span, metavar="SPAN", help="How often it looks, as PT0.5S.")
    ] = "PT1S",  # type: ignore[assignment]
    once: Annotated[bool, typer.Option("--once", help="Look twice, print once, end.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Watch topics, groups and members: rates, lag and where it goes, who owns what. Ctrl-C ends it.

    Rates are over the time between two looks. With --json an object a look, a line each. Without a terminal the tables
    are printed one below the other. Asks for a few numbers of each partition and changes nothing.
    """
    if every < LEAST:
        raise typer.BadParameter(f"look at most every {LEAST.total_seconds():g} s", param_hint="--every")

    async def act() -> None:
        async with connected(url) as session:
            with screen(as_json=as_json, is_live=not once) as show:
                title = f"rsmq top  {printable(redact(session.client.url))}  prefix {session.keys.prefix}"
                async for board in boards(session, topic, every):
                    show(board, title)
                    if once:
                        return

    with contextlib.suppress(KeyboardInterrupt):
        anyio.run(act)


async def boards(session: Session, topic: str | None, every: timedelta) -> AsyncIterator[Board]:
    """A board a look; the first after two looks, so that it has rates."""
    if topic is not None:
        await session.topic(topic)
    wanted = None if topic is None else [topic]
    before = await session.inspector.snapshot(wanted)
    while True:
        await anyio.sleep(every.total_seconds())
        after = await session.inspector.snapshot(wanted)
        yield compare(before, after)
        before = after


@contextlib.contextmanager
def screen(*, as_json: bool, is_live: bool) -> Iterator[Show]:
    """Where boards go: the whole terminal, the end of it, or lines for programs."""
    if as_json:
        yield lambda board, title: dump(asdict(board), is_line=True)
        return
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    if not (is_live and console.is_terminal):
        yield lambda board, title: console.print(draw(board, title, with_shares=has_room(board)))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda board, title: live.update(draw(board, title, with_shares=has_room(board)), refresh=True)


def has_room(board: Board) -> bool:
    """Whether the partitions can be shown one by one."""
    return len(board.topics) == 1 or sum(len(group.shares) for group in board.groups) <= MOST_SHARES
