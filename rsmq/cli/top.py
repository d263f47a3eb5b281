"""`rsmq top`: topics, groups and members, refreshed every second."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any

import anyio
import typer
from rich.console import Console, Group
from rich.live import Live

from rsmq.cli.connection import CommandConnection, connected
from rsmq.cli.keyboard import keyboard
from rsmq.cli.output import print_json
from rsmq.cli.parameters import AnyTopic, Json, Url, duration_option, example
from rsmq.cli.tables import PIPED_WIDTH
from rsmq.cli.top_screen import draw
from rsmq.cli.top_view import TopView, picture, press, room_of, settled
from rsmq.inspector.trend import Board, compare
from rsmq.model.words import printable
from rsmq.redis.client.connector import redact

LEAST = timedelta(milliseconds=100)
MOST_PARTITIONS = 16
"""Partitions are shown up to this number in all groups together, or if one topic was asked for."""

Show = Callable[[Board, str], None]


@example("rsmq top orders --every 500ms")
def top(
    topic: AnyTopic = None,
    every: Annotated[timedelta, duration_option("Time between two refreshes, such as 500ms.")] = "1s",  # type: ignore[assignment]
    once: Annotated[bool, typer.Option("--once", help="Measure once, print, and end.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Watch topics, groups and members: rates, backlog, trend, owners. The worst come first, idle ones are folded.

    Keys: q quits, s sorts, / filters, i shows idle groups, arrows choose, Enter opens a group, Esc goes back. Rates are
    measured between two refreshes. --json prints an object a line. With --once, or without a terminal, all tables are
    printed. It reads a few numbers of each partition and changes nothing.
    """
    if every < LEAST:
        raise typer.BadParameter(f"use {LEAST.total_seconds():g} s or more", param_hint="--every")

    async def act() -> None:
        async with connected(url) as connection:
            title = f"rsmq top  {printable(redact(connection.client.url))}  prefix {connection.keys.prefix}"
            if not (as_json or once) and has_screen():
                await TopScreen(title).run(boards(connection, topic, every))
                return
            with printer(as_json=as_json) as show:
                async for board in boards(connection, topic, every):
                    show(board, title)
                    if once:
                        return

    with contextlib.suppress(KeyboardInterrupt):
        anyio.run(act)


def has_screen() -> bool:
    """Whether it runs on a terminal that can be drawn on. A `dumb` one, as inside of an editor, would stay empty."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not Console().is_dumb_terminal


async def boards(connection: CommandConnection, topic: str | None, every: timedelta) -> AsyncIterator[Board]:
    """A board for each refresh. The first comes after two snapshots, because rates need two."""
    if topic is not None:
        await connection.topic(topic)
    wanted = None if topic is None else [topic]
    before = await connection.inspector.snapshot(wanted)
    while True:
        await anyio.sleep(every.total_seconds())
        after = await connection.inspector.snapshot(wanted)
        yield compare(before, after)
        before = after


@contextlib.contextmanager
def printer(*, as_json: bool) -> Iterator[Show]:
    """How boards are printed: one below the other, or as JSON lines."""
    if as_json:
        yield lambda board, title: print_json(as_object(board), is_line=True)
        return
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    yield lambda board, title: console.print(draw(board, title, with_partitions=has_room(board)))


class TopScreen:
    """The whole terminal, with keys. It is drawn again for each board and after each key."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._view = TopView()
        self._board = Board(None, (), ())
        self._console = Console(highlight=False)

    async def run(self, found: AsyncIterator[Board]) -> None:
        """Until a key ends it."""
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            async with anyio.create_task_group() as tasks:

                def on_key(key: str) -> None:
                    room = room_of(self._console.height)
                    self._view = settled(press(self._view, key, self._board, room), self._board, room)
                    self._draw(live)
                    if self._view.is_done:
                        tasks.cancel_scope.cancel()

                with keyboard(on_key):
                    self._draw(live)
                    async for self._board in found:
                        self._view = settled(self._view, self._board, room_of(self._console.height))
                        self._draw(live)

    def _draw(self, live: Live) -> None:
        width, height = self._console.size
        live.update(Group(*picture(self._board, self._view, self._title, width, height)), refresh=True)


def as_object(board: Board) -> dict[str, Any]:
    """For programs. Of a partition only what the tables show: its owner while the lease runs, unread where known."""
    found = asdict(board)
    for group, state in zip(found["groups"], board.groups, strict=True):
        for member in group["members"]:
            del member["is_present"]  # a snapshot does not ask
        group["shares"] = [
            {
                "partition": share.partition, "owner": share.owner if share.is_owned else "", "epoch": share.epoch,
                "unread": share.unread if share.is_unread_exact else None, "pending": share.pending,
                "waiting_for_retry": share.waiting_for_retry,
                "dead_letters": share.dead_letters, "oldest": share.oldest,
            }
            for share in state.shares
        ]  # fmt: skip
    return found


def has_room(board: Board) -> bool:
    """Whether the partitions are shown one by one."""
    return len(board.topics) == 1 or sum(len(group.shares) for group in board.groups) <= MOST_PARTITIONS
