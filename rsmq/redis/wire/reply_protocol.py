"""The replies of one connection: an asyncio protocol, which costs less than a stream of redis-py's."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import hiredis
from redis.asyncio.connection import DefaultParser
from redis.exceptions import ConnectionError as ServerGone
from redis.exceptions import InvalidResponse

NOTHING: Final = object()
"""No whole reply has arrived."""
MOST_UNREAD: Final = 1 << 20
"""Bytes that may arrive while no task reads; then the socket is not read either, so that the server notices it."""


class ReplyProtocol(asyncio.Protocol):
    """Replies for one task, and room to write for another one.

    redis-py makes the connection with a stream. This takes its place behind the handshake; the stream still gets the
    end of the connection.
    """

    __slots__ = (
        "_end", "_is_paused", "_least", "_loop", "_most", "_reader", "_replies", "_room", "_stream", "_unread",
        "_waiter", "transport",
    )  # fmt: skip

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self._stream = transport.get_protocol()
        self._loop = asyncio.get_running_loop()
        self._reader: Any = hiredis.Reader(
            protocolError=InvalidResponse, replyError=DefaultParser.parse_error, notEnoughData=NOTHING
        )
        self._replies: list[Any] = []
        self._least = 0
        """Replies that the reader waits for."""
        self._most = 0
        """Replies that the reader takes at once."""
        self._unread = 0
        """Bytes that have come since replies were taken."""
        self._is_paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        """While the server takes nothing more."""
        self._end: Exception | None = None
        transport.set_protocol(self)

    # -- for the tasks ---------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Write, also if the server does not take it yet: see `drained`."""
        if self._end is not None or self.transport.is_closing():
            raise self._end or ServerGone("the connection is closed")
        self.transport.write(data)

    async def drained(self, seconds: float) -> None:
        """Wait until the server takes more. Raises TimeoutError."""
        if self._room is not None:
            await self._within(seconds, self._room)

    async def replies(self, least: int, most: int, seconds: float) -> list[Any]:
        """The next replies: `least`, and what has arrived with them, up to `most`. Errors of the server are in their
        places. Raises TimeoutError, and the error with which the connection has ended.
        """
        self._replies = []
        self._least = least
        self._most = most
        if not self._take():
            if self._end is not None:
                raise self._end
            self._waiter = self._loop.create_future()
            try:
                await self._within(seconds, self._waiter)
            finally:
                self._waiter = None
        replies, self._replies = self._replies, []  # not kept until the next ones: it may be a thousand messages
        return replies

    async def _within(self, seconds: float, event: asyncio.Future[None]) -> None:
        timer = self._loop.call_later(seconds, expire, event)
        try:
            await event
        finally:
            timer.cancel()

    def _take(self) -> bool:
        """Take replies that have arrived. Returns whether these are enough."""
        replies, most, following = self._replies, self._most, self._reader.gets
        self._unread = 0
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()
        while len(replies) < most and (reply := following(False)) is not NOTHING:
            replies.append(reply)
        return len(replies) >= self._least

    # -- for the transport -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived."""
        self._reader.feed(data)
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._unread += len(data)
            if self._unread > MOST_UNREAD and not self._is_paused:
                self._is_paused = True
                self.transport.pause_reading()
            return
        try:
            if self._take():
                waiter.set_result(None)
        except (InvalidResponse, ValueError, IndexError) as error:  # the last two: redis-py cannot parse an error
            fail(waiter, error)

    def pause_writing(self) -> None:
        """The server does not take what is written."""
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        """It does again."""
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._end = exc if isinstance(exc, OSError) else ServerGone("Connection closed by server.")
        for each in (self._waiter, self._room):
            if each is not None:
                fail(each, self._end)
        self._stream.connection_lost(exc)

    def __repr__(self) -> str:
        return f"<ReplyProtocol{' ended' if self._end else ''}>"


def expire(event: asyncio.Future[None]) -> None:
    """The time for an event is over."""
    fail(event, TimeoutError())


def fail(event: asyncio.Future[None], error: Exception) -> None:
    """The event will not come."""
    if not event.done():
        event.set_exception(error)
        event.exception()  # a task need not wait for room: without this, asyncio would log that no task took the error
