"""A proxy in front of a real server that answers in its place: "not here" and "not now", as a server would say it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Self

import hiredis
from anyio.from_thread import start_blocking_portal

ANSWERS: Final = {
    "READONLY": "You can't write against a read only replica.",
    "LOADING": "Redis is loading the dataset in memory",
    "MASTERDOWN": "Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "CLUSTERDOWN": "The cluster is down",
    "MOVED": "866 127.0.0.1:1",
    "NOREPLICAS": "Not enough good replicas to write.",
    "BUSY": "Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "MISCONF": "Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
    "OOM": "command not allowed when used memory > 'maxmemory'.",
    "TRYAGAIN": "Multiple keys request during rehashing of slot",
    "silence": "",
}
"""What a server says that takes a command neither now nor here. Silence: it says nothing, and closes nothing."""
HANDSHAKE: Final = (b"HELLO", b"AUTH", b"SELECT", b"CLIENT", b"PING", b"SUBSCRIBE", b"SSUBSCRIBE", b"INFO", b"COMMAND")
"""What a server does all the same, so that connections are made and a name alone does not show the trouble."""


class AnsweringProxy:
    """Forwards command after command to a port of this machine. While `answer` is set, that is the reply to all others.

    A connection that subscribes is passed on as it is. With `move` only the connections that are open then get the
    answer, and new ones lead to another port: a name that leads to another server.
    """

    def __init__(self, target: int) -> None:
        self.answer = ""
        self.refused: list[bytes] = []
        """The commands that were answered so."""
        self._target = target
        self._is_moved = False
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The address that clients behind the proxy connect to."""
        assert self._server is not None, "the proxy is used inside `async with`"
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    def move(self, target: int) -> None:
        """Let new connections lead to another server, which answers itself."""
        self._target = target
        self._is_moved = True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_writer = None
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            await self._pass(reader, writer, far_reader, far_writer, answers=not self._is_moved)
        except (OSError, asyncio.CancelledError):
            pass  # one end is gone, or the test is over
        finally:
            self._tasks.discard(task)
            for end in (writer, far_writer):
                if end is not None:
                    end.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter, *, answers: bool,
    ) -> None:  # fmt: skip
        requests, replies = hiredis.Reader(), hiredis.Reader()
        while data := await reader.read(1 << 16):
            requests.feed(data)
            while (command := requests.gets()) is not False:
                name = command[0].upper()
                if self.answer and answers and name not in HANDSHAKE:
                    self.refused.append(name)
                    if self.answer != "silence":
                        writer.write(f"-{self.answer} {ANSWERS[self.answer]}\r\n".encode())
                    continue
                far_writer.write(hiredis.pack_command(tuple(command)))  # type: ignore[no-untyped-call]
                if name in (b"SUBSCRIBE", b"SSUBSCRIBE"):
                    await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
                    return
                await self._one_reply(replies, far_reader, writer)

    async def _one_reply(self, replies: Any, far_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await far_reader.read(1 << 16):
            writer.write(data)
            replies.feed(data)
            if replies.gets() is not False:
                return
        raise ConnectionResetError("the server has closed the connection")

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward one direction until it ends."""
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@contextmanager
def answering(target: int) -> Iterator[AnsweringProxy]:
    """The proxy in a thread, for tests without an event loop."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(AnsweringProxy(target)) as proxy:
        yield proxy
