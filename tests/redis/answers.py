"""A proxy in front of a real server that answers in its place: "not here" and "not now", as a server would say it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import hiredis
from anyio.from_thread import start_blocking_portal

from rsmq.testing.proxy import Proxy

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


class AnsweringProxy(Proxy):
    """Forwards command after command to a port of this machine. While `answer` is set, that is the reply to all others.

    A connection that subscribes is passed on as it is. With `move` only the connections that are open then get the
    answer, and new ones lead to another port: a name that leads to another server.
    """

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.answer = ""
        self.refused: list[bytes] = []
        """The commands that were answered so."""
        self._is_moved = False

    def move(self, target: int) -> None:
        """Let new connections lead to another server, which answers itself."""
        super().move(target)
        self._is_moved = True

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        answers = not self._is_moved
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
                    await super()._pass(reader, writer, far_reader, far_writer)
                    return
                await self._one_reply(replies, far_reader, writer)

    async def _one_reply(self, replies: Any, far_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await far_reader.read(1 << 16):
            writer.write(data)
            replies.feed(data)
            if replies.gets() is not False:
                return
        raise ConnectionResetError("the server has closed the connection")


@contextmanager
def answering(target: int) -> Iterator[AnsweringProxy]:
    """The proxy in a thread, for tests without an event loop."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(AnsweringProxy(target)) as proxy:
        yield proxy
