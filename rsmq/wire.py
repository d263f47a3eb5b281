"""One raw connection: commands packed once, many written together, replies read in order without any conversion.

redis-py does the handshake, TLS and credentials; its per-command machinery is left out of the way of the hot path.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Final

import anyio
import hiredis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from rsmq.connect import Client, translate
from rsmq.errors import BrokerError, SlotMoved

try:
    from redis._parsers.hiredis import NOT_ENOUGH_DATA
except ImportError:
    NOT_ENOUGH_DATA = None

FAILURES: Final = (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, IndexError)
"""The last two: an answer that the client library cannot take apart, such as a MOVED without an address."""


def pack(command: Sequence[str | bytes | int | float]) -> bytes:
    """One command in wire form."""
    packed: bytes = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]
    return packed


def extend(packed: bytes, count: int, arguments: Iterable[bytes]) -> bytes:
    """A packed command with `count` further arguments, which are in wire form already."""
    at = packed.index(b"\r\n")
    return b"".join((b"*%d" % (int(packed[1:at]) + count), packed[at:], *arguments))


class Wire:
    """A connection of its own to one server, for one task at a time; on a cluster, made with `client.node_for(key)`.

    An error in a reply is returned in its place, not raised.
    """

    def __init__(self, client: Client) -> None:
        self.node = client
        self._timeout = client.timeout
        self._connection = client.connection_pool.make_connection()
        self.client_id = 0
        self.address = ""

    @property
    def is_open(self) -> bool:
        """Whether it has been connected and not been seen to break."""
        return bool(self.client_id) and self._connection.is_connected

    async def open(self) -> None:
        """Connect and learn under which id the server knows this connection."""
        async with self._bounded():
            await self._connection.connect()
            info = (await self.exchange([pack(("CLIENT", "INFO"))]))[0]
            if isinstance(info, Exception):
                raise info
            # not split at blanks: the path of a unix socket may have some
            said = info.decode(errors="replace") if isinstance(info, bytes) else ""
            found = re.match(r"id=(\d+) addr=(.*?) laddr=", said)
            if found is None:
                raise BrokerError(f"CLIENT INFO says {info!r}: this is not a Redis 7.0 or Valkey 8 server")
            self.client_id, self.address = int(found[1]), found[2]

    async def close(self) -> None:
        """Drop the connection; whatever was in flight is unknown."""
        self.client_id = 0
        await self._connection.disconnect(nowait=True)

    async def send(self, commands: Sequence[bytes]) -> None:
        """Write packed commands together."""
        async with self._bounded():
            await self._connection.send_packed_command(commands, check_health=False)

    async def receive(self, count: int, timeout: float | None = None) -> list[Any]:
        """The next replies. Raises BrokerUnavailable when they do not come in time: the connection is then useless."""
        async with self._bounded(timeout):
            return await self._replies(count)

    async def exchange(self, commands: Sequence[bytes], timeout: float | None = None) -> list[Any]:
        """Write commands together and read as many replies, all within one time limit."""
        async with self._bounded(timeout):
            await self._connection.send_packed_command(commands, check_health=False)
            return await self._replies(len(commands))

    async def _replies(self, count: int) -> list[Any]:
        replies: list[Any] = []
        while len(replies) < count:
            replies.append(await self._reply())
            self._take_arrived(replies, count)
        return replies

    async def _reply(self) -> Any:
        try:
            return await self._connection.read_response(disable_decoding=True, disconnect_on_error=False)
        except ResponseError as error:
            return self._answer(error)

    def _take_arrived(self, replies: list[Any], count: int) -> None:
        """What has come with a reply, straight out of redis-py's parser: a tenth of the price of asking for it.

        It goes by private names. Without them every reply is asked for; a test tells that they are gone.
        """
        reader = getattr(getattr(self._connection, "_parser", None), "_reader", None)
        if reader is None or NOT_ENOUGH_DATA is None:
            return
        while len(replies) < count:
            reply = reader.gets(False)
            if reply is NOT_ENOUGH_DATA:
                return
            replies.append(self._answer(reply) if isinstance(reply, Exception) else reply)

    def _answer(self, error: Exception) -> Exception:
        """An error as a reply. One that says that the connection is of no use is raised."""
        if not isinstance(error, ResponseError):
            raise error
        if isinstance(error, NoScriptError):
            return error
        answer = translate(error)
        if isinstance(answer, SlotMoved):
            self.node.hear(answer)
        return answer

    def _bounded(self, timeout: float | None = None) -> Limit:
        return Limit(self, self._timeout if timeout is None else timeout)


class Limit:
    """A time limit around something that a wire does; a class, since a generator would double its cost.

    Raises our errors, also for a peer that reads or answers too slowly, and drops the connection with them. With a
    cancellation, too: replies that nobody has read would be taken for those of the next commands.
    """

    __slots__ = ("_timeout", "_wire")

    def __init__(self, wire: Wire, seconds: float) -> None:
        self._wire, self._timeout = wire, asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, at)
        except TimeoutError as late:
            error = late
        if error is not None:
            await self._drop(error)

    async def _drop(self, error: BaseException) -> None:
        with anyio.CancelScope(shield=True):
            await self._wire.close()
        if isinstance(error, NoScriptError) or not isinstance(error, FAILURES):
            return
        if isinstance(error, RedisError | OSError):
            self._wire.node.hear(translate(error))
        raise translate(error, self._wire.node.url) from error
