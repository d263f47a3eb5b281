"""Raw connections: commands are packed once and written together; replies are read in order, without conversion.

A `RawConnection` leads to one server, a `ShardedConnection` to each node that holds some of the keys. redis-py does the
handshake, TLS and credentials. Its code per command is too slow for the hot path.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Final

import anyio
import hiredis
from redis.exceptions import ConnectionError as ServerGone
from redis.exceptions import NoScriptError, RedisError, ResponseError

from rsmq.errors import BrokerError, BrokerUnavailable, SlotMoved
from rsmq.redis.client.client import any_elsewhere
from rsmq.redis.client.connector import Client, translate
from rsmq.redis.scripts import packed_with_source
from rsmq.redis.wire.reply_protocol import ReplyProtocol
from rsmq.redis.wire.slots import Key

Packed = tuple[Key, bytes]
"""A key, which decides the node, and a packed command on keys of the same slot."""

FAILURES: Final = (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, IndexError)
"""The last two: a reply that redis-py cannot parse, such as a MOVED without an address."""


def pack(command: Sequence[str | bytes | int | float]) -> bytes:
    """One command in the wire format."""
    packed: bytes = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]
    return packed


def server_id(info: Any) -> str:
    """The id of the server process, from an answer to INFO. Empty where that is not allowed, or has none."""
    found = re.search(rb"\brun_id:(\w+)", info) if isinstance(info, bytes) else None
    return "" if found is None else found[1].decode()


def kill_command(name: str) -> tuple[str, ...]:
    """The command that closes the connection of this `name`, with what it has not read of it yet.

    Both id and address must match, so that after a restart of the server no other client is hit.
    """
    client_id, _, address = name.partition(" ")
    return "CLIENT", "KILL", "ID", client_id, "ADDR", address


MOST_ARRIVED: Final = 1000
"""Replies that are read at once: the event loop serves others in between."""
ASKING: Final = pack(("ASKING",))
ANOTHER_SERVER: Final = "another server process answers by now"


class RawConnection:
    """A connection to one server, for one task that reads and one that writes.

    On a cluster it is made with `client.node_for(key)`. An error in a reply is returned in its place, not raised.
    """

    def __init__(self, client: Client) -> None:
        self.node = client
        self._timeout = client.timeout
        self._connection = client.connection_pool.make_connection()
        self._protocol: ReplyProtocol | None = None
        self.client_id = 0
        self.address = ""
        self._lacks_script = False
        self._is_elsewhere = False  # an answer said that the right server may be another one by now
        self._is_refused = False
        self._departures = client.departures
        self._last = ""  # the name of the last connection, if commands on it may still be on their way

    @property
    def is_open(self) -> bool:
        """Whether it was opened and no error has closed it since."""
        return bool(self.client_id) and self._connection.is_connected

    @property
    def name(self) -> str:
        """Its id and address in the server, for `kill_command`; empty while it is not open."""
        return f"{self.client_id} {self.address}" if self.is_open else ""

    async def open(self) -> None:
        """Connect, and read the id that the server has given this connection.

        If the last connection broke, the server ends it first: a command that was late on it is not executed after its
        repetition on this one.
        """
        try:
            async with asyncio.timeout(self._timeout):
                await self._open()
        except BaseException as error:
            await self._drop(error)
            raise

    async def _open(self) -> None:
        self._departures = self.node.departures
        await self._connection.connect()
        transport = self._connection._writer.transport
        self._protocol = ReplyProtocol(transport)
        info = (await self.exchange([pack(("CLIENT", "INFO"))]))[0]
        if isinstance(info, Exception):
            raise info
        # no split at blanks: the path of a unix socket may contain some
        said = info.decode(errors="replace") if isinstance(info, bytes) else ""
        found = re.match(r"id=(\d+) addr=(.*?) laddr=", said)
        if found is None:
            raise BrokerError(f"CLIENT INFO says {info!r}: this is not a Redis 7.0 or Valkey 8 server")
        client_id, address = int(found[1]), found[2]
        ends_last = [pack(kill_command(self._last))] if self._last else []
        server, *replies = await self.exchange([pack(("INFO", "server")), *ends_last])
        for reply in replies:
            if isinstance(reply, BrokerUnavailable):  # another error: no right to do it
                raise reply
        self.client_id = client_id
        self.address = address
        self._last = ""
        self.node.note_server(server_id(server))

    def check_server(self) -> None:
        """Raise BrokerUnavailable if answers on other connections say that the right server may be another one by now.

        For a connection that only listens: a demoted master goes on to serve it, and closes nothing.
        """
        if self.node.departures != self._departures:
            raise BrokerUnavailable("the right server may be another one by now")

    async def close(self) -> None:
        """Close the connection; commands in flight may or may not be executed."""
        self.client_id = 0
        self._protocol = None
        await self._connection.disconnect(nowait=True)

    async def send(self, commands: Sequence[bytes]) -> None:
        """Write packed commands together."""
        try:
            await self._write(commands).drained(self._timeout)
        except BaseException as error:
            await self._drop(error)
            raise

    async def receive(self, count: int, timeout: float | None = None) -> list[Any]:
        """The next replies. Raises BrokerUnavailable, and closes the connection, when they do not come in time."""
        try:
            return await self._receive(count, count, timeout)
        except BaseException as error:
            await self._drop(error)
            raise

    async def receive_arrived(self, timeout: float) -> list[Any]:
        """The next reply, and all that have arrived with it."""
        try:
            return await self._receive(1, MOST_ARRIVED, timeout)
        except BaseException as error:
            await self._drop(error)
            raise

    async def exchange(
        self, commands: Sequence[bytes], timeout: float | None = None, *, asking: bool = False, last: bytes = b""
    ) -> list[Any]:
        """Write commands together and read as many replies within a time limit.

        A script that the server does not have is written again with its source, with a limit of its own. When a reply
        says that this server is not the right one any more, the connection closes: open it again. `asking`: the
        commands are on slots that this node is about to take over. `last` (WAIT) is written behind
        all others, its reply comes last.
        """
        try:
            self._lacks_script = False
            self._is_elsewhere = False
            replies = await self._exchange(commands, timeout, asking, last)
            if self._lacks_script:
                unknown = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
                again = [packed_with_source(commands[at]) for at in unknown]
                answers = await self._exchange(again, timeout, asking, last)
                for at, answer in zip((*unknown, *([-1] if last else ())), answers, strict=True):
                    replies[at] = answer
            if self._is_elsewhere:
                self.node.note_departure()
                await self.close()  # nothing is on its way: every reply is here
            return replies
        except BaseException as error:
            await self._drop(error)
            raise

    async def _exchange(self, commands: Sequence[bytes], timeout: float | None, asking: bool, last: bytes) -> list[Any]:
        packed = [part for command in commands for part in (ASKING, command)] if asking else commands
        count = len(packed)
        if last:
            packed = [*packed, last]
        self._write(packed)
        replies = await self._receive(len(packed), len(packed), timeout)
        return [*replies[1:count:2], *replies[count:]] if asking else replies

    @property
    def _opened(self) -> ReplyProtocol:
        if self._protocol is None:
            raise ServerGone("the connection is not open")
        return self._protocol

    def _write(self, commands: Sequence[bytes]) -> ReplyProtocol:
        protocol = self._opened
        protocol.write(commands[0] if len(commands) == 1 else b"".join(commands))
        return protocol

    async def _receive(self, least: int, most: int, timeout: float | None) -> list[Any]:
        replies = await self._opened.replies(least, most, self._timeout if timeout is None else timeout)
        refused = None
        for at, reply in enumerate(replies):
            if isinstance(reply, Exception):
                replies[at] = answer = self._answer(reply)
                if isinstance(answer, BrokerUnavailable):
                    refused = answer
        if refused is not None:
            self._refused(refused)
        elif self._is_refused and self.client_id:  # more than a handshake, which succeeds on a server that refuses all
            self._is_refused = False
            self.node.refusals.done(id(self))
        return replies

    def _refused(self, error: BrokerUnavailable) -> None:
        self._is_refused = True
        self.node.refusals.note(id(self), error)

    def _answer(self, error: Exception) -> Exception:
        """An error reply as its result. An error about the connection itself is raised."""
        if not isinstance(error, ResponseError):
            raise error
        if isinstance(error, NoScriptError):
            self._lacks_script = True
            return error
        answer = translate(error)
        if any_elsewhere((answer,), is_node=self.node.is_node):
            self._is_elsewhere = True
        if isinstance(answer, SlotMoved):
            self.node.note_error(answer)
        return answer

    async def _drop(self, error: BaseException) -> None:
        """Close the connection after an error or a cancellation: replies that were not read would be taken for those
        of the next commands. Raises our error, also for a server that reads or answers too slowly.
        """
        if self.client_id:
            self._last = f"{self.client_id} {self.address}"
        if self._protocol is not None:  # otherwise socket and commands stay until the server takes the rest of them
            self._protocol.transport.abort()
        with anyio.CancelScope(shield=True):
            await self.close()
        if isinstance(error, NoScriptError) or not isinstance(error, FAILURES):
            return
        if isinstance(error, RedisError | OSError):
            self.node.note_error(translate(error))
        found = translate(error, self.node.url)
        if isinstance(found, BrokerUnavailable):
            self._refused(found)
        raise found from error


class ShardedConnection:
    """A raw connection to each node that is needed (one, on a single server), for one task at a time.

    An error in a reply is returned in its place, as on a `RawConnection`. For an unreachable node every reply is
    BrokerUnavailable: its commands may or may not be executed. A command that reached the wrong node was not executed,
    so it follows its slot; commands on one slot stay in order. With `replicas`, a reply is BrokerUnavailable, too,
    unless so many replicas of its node have confirmed what was written. With `is_bound` what was to be sent to one
    server process is not sent to the next one, which may have lost what came before.
    """

    def __init__(self, client: Client, replicas: int = 0, *, is_bound: bool = False) -> None:
        self._client, self._replicas = client, replicas
        self._is_bound = is_bound
        self._connections: dict[Client, RawConnection] = {}

    def wait_for(self, replicas: int) -> None:
        """From now on so many replicas must confirm what was written."""
        self._replicas = replicas

    async def exchange(self, commands: Sequence[Packed], timeout: float | None = None) -> list[Any]:
        """One reply per command, in order. Raises only ConfigError (refused credentials) and cancellation."""

        async def send(node: Client, packed: list[bytes], *, asking: bool) -> list[Any]:
            return await self._send(node, packed, asking=asking, timeout=timeout)

        return await self._client.spread(commands, send)

    async def _send(self, node: Client, packed: list[bytes], *, asking: bool, timeout: float | None) -> list[Any]:
        """The replies of one node. Its connection is opened on first use, and again after an error."""
        connection = self._connections.get(node)
        if connection is None:
            connection = self._connections[node] = RawConnection(node)
        changes = node.server_changes
        try:
            if not connection.is_open:
                await connection.open()
            if self._is_bound and node.server_changes != changes:
                raise BrokerUnavailable(ANOTHER_SERVER)
            if not self._replicas:
                return await connection.exchange(packed, timeout, asking=asking)
            wait = pack(("WAIT", self._replicas, round(node.timeout * 500)))
            *replies, reached = await connection.exchange(packed, timeout, asking=asking, last=wait)
            if isinstance(reached, Exception) or reached < self._replicas:
                raise BrokerUnavailable(f"only {reached} of {self._replicas} replicas have confirmed it in time")
            return replies
        except BrokerUnavailable as error:
            return [error] * len(packed)
        except BrokerError as error:  # not about a command: the connection itself was refused
            return [BrokerUnavailable(str(error))] * len(packed)

    async def close(self) -> None:
        """Close the connections; the next exchange opens them again."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():  # suspends nowhere, so a cancellation does not interrupt it
            await connection.close()

    def __repr__(self) -> str:
        return f"<ShardedConnection nodes={len(self._connections)}>"
