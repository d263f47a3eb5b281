"""Clients on top of redis-py, with raw replies, and the one translation of its errors into ours.

The layers above see only raw replies (bytes, ints, lists, in RESP2 shape) and rsmq's own errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self, TypeVar

import anyio
import redis
import redis.asyncio
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelPool
from redis.client import PubSub
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    MaxConnectionsError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
)

from rsmq.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigError,
    GroupMissing,
    NotPermitted,
    PartitionSealed,
    ScriptError,
    SlotMoved,
    SlotMoving,
)
from rsmq.model.page_limit import PageLimit
from rsmq.redis.client.pool_connections import packed, repair
from rsmq.redis.client.refusals import Refusals
from rsmq.redis.scripts import with_source
from rsmq.redis.wire.slots import Key
from rsmq.redis.wire.url import redact

TRANSIENT = {
    "LOADING": "the server is loading its data",
    "READONLY": "this server has become a replica",
    "MASTERDOWN": "the replica has lost its master",
    "CLUSTERDOWN": "the cluster is down",
    "NOREPLICAS": "too few replicas are in sync",
    "UNBLOCKED": "the server ended the blocking read",
    "BUSY": "the server runs a long script",
    "MISCONF": "the server cannot write to its disk: free space, or see its log",
    "OOM": "the server is out of memory: raise maxmemory or trim topics (`rsmq topic list`)",
}
MOST_AT_ONCE = 50
"""Concurrent commands of one client. redis-py does not queue: beyond 100 connections it raises."""
ELSEWHERE = ("READONLY", "MASTERDOWN", "CLUSTERDOWN", "UNBLOCKED", "LOADING", "NOREPLICAS", "MISCONF")
"""Answers of a server that may not be the right one any more: each way to send a command leaves it.

The others say "not now" of a server that is the right one: BUSY, OOM, and TRYAGAIN of a slot that moves. A new
connection would not help, and thousands of them would make it worse. `tests/redis/test_moved_name.py` has the table.
"""
TOO_MANY_CLIENTS: Final = (
    "The limit `maxclients` of the server is reached: raise it (CONFIG SET maxclients, or a larger plan), or run fewer "
    "processes; docs/deployment.md says how many connections each of them needs"
)
LIMITS = {
    "max number of clients": TOO_MANY_CLIENTS,
    "Connection not ready": TOO_MANY_CLIENTS,  # redis-py: the server has said something before the first command
    "Too many open files": "This process may open no more files: raise its limit (ulimit -n, LimitNOFILE of systemd)",
}
"""What a connection is refused with when a limit is reached, and what to do then."""
CLOSED = ("losed by server", "reset by peer", "Broken pipe", "bytes read on a total of")
"""What the errors say of a connection that was closed while an answer was awaited. A time-out says nothing: a server
that hangs answers no smaller question, either."""
ACCEPTED: set[str] = set()
"""URLs whose credentials have been accepted. A later refusal is retried: a password may be about to change."""


def translate(error: BaseException, url: str = "") -> BrokerError | ConfigError:
    """A redis-py, socket or timeout error as one of ours."""
    while isinstance(error.__cause__, RedisError):
        error = error.__cause__  # an error reply during the handshake is wrapped in a ConnectionError
    if isinstance(error, UnicodeEncodeError):  # of a command, before it is sent
        return ConfigError("a text of the call is not valid Unicode: it has a lone surrogate")
    if isinstance(error, ValueError | IndexError):
        return BrokerError(
            f"the reply of {redact(url) or 'the server'} cannot be read ({error}): is it a Redis or Valkey server?"
        )
    if isinstance(error, AskError):  # MOVED is one, too
        return SlotMoved(error.slot_id, error.node_addr, is_ask=not isinstance(error, MovedError))
    # EXEC names what has refused it, such as READONLY after a failover
    text = str(error).removeprefix("Transaction discarded because of: ")
    where = f" at {redact(url)}" if url else ""
    # redis-py removes the code of an error that it has a class for, so the class gives the code
    code = text.split(" ", 1)[0].rstrip(":")
    named = {"BusyLoadingError": "LOADING", "ReadOnlyError": "READONLY", "MasterDownError": "MASTERDOWN",
             "ClusterDownError": "CLUSTERDOWN", "TryAgainError": "TRYAGAIN", "OutOfMemoryError": "OOM"}  # fmt: skip
    code = named.get(type(error).__name__, code)
    if isinstance(error, AuthenticationError | AuthorizationError) or code in ("WRONGPASS", "NOAUTH"):
        said = f"the server{where} refused the credentials ({text}): check user and password in RSMQ_URL"
        return BrokerUnavailable(said) if url in ACCEPTED else ConfigError(said)
    if isinstance(error, NoPermissionError) or code == "NOPERM":
        return NotPermitted(f"the server's ACL does not allow this ({text}): see the list of commands in docs/keys.md")
    if code == "TRYAGAIN" or "access a non local key" in text:  # the latter: of a script, some keys have moved
        return SlotMoving(f"a slot is moving ({text})")
    if "WAIT cannot be used with replica" in text[:60]:
        code = "READONLY"
    if code in TRANSIENT:
        unavailable = BrokerUnavailable(f"{TRANSIENT[code]} ({text})")
        unavailable.is_elsewhere = code in ELSEWHERE
        return unavailable
    if code == "NOGROUP" or "NOGROUP" in text[:80]:
        return GroupMissing(text)
    if code == "WRONGTYPE":
        text = f"{text.rstrip('.')}. Another program has written a key of rsmq: `rsmq doctor` names it"
    if "last possible ID" in text or " takes no entries" in text:
        return PartitionSealed(f"{text.partition(' script: ')[0]}. {LAST_ID}")
    if text == "DB index is out of range":
        said = f"the server{where} has no such database: check the number at the end of RSMQ_URL"
        return BrokerUnavailable(said) if url in ACCEPTED else ConfigError(said)
    if "unknown command" in text[:40]:  # a provider has taken it away, or renamed it
        return BrokerError(f"{text.strip()}: rsmq needs this command. docs/keys.md has the list of all")
    if isinstance(error, ResponseError):
        return ScriptError(text) if "script" in text else BrokerError(text)
    if isinstance(error, MaxConnectionsError):
        return BrokerError(text)
    # what follows "No master found" is the repr of every connection
    reason = text.partition(" : <")[0].rstrip(".") or type(error).__name__
    broken = BrokerUnavailable(f"no answer from the server{where}: {reason}. {advise(reason, url)}")
    broken.is_broken = "connecting" not in reason and any(sign in reason for sign in CLOSED)
    return broken


def advise(reason: str, url: str) -> str:
    """Advice for a server that does not answer. One that has answered before is not suspected to be another one."""
    for sign, advice in LIMITS.items():
        if sign in reason:
            return advice
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return "Let the option ssl_ca_certs of RSMQ_URL name the authority that has signed the server's certificate"
    if url and url not in ACCEPTED:
        if reason.startswith("Protocol error"):
            return "Another service answers there, not Redis or Valkey: check host and port in RSMQ_URL"
        if "unknown command 'SENTINEL'" in reason:
            return "This server is not a Sentinel: use redis://, or the port of a Sentinel, in RSMQ_URL"
        is_tls = url.startswith("rediss")
        if is_tls and ("Timeout" in reason or "SSL" in reason):
            return "Is it running, and does it speak TLS at this port? If not, use redis:// in RSMQ_URL"
        if not is_tls and ("closed by server" in reason or "reset by peer" in reason):
            return "Is it running? If it speaks TLS at this port, use rediss:// in RSMQ_URL"
    return "Is it running? Check RSMQ_URL"


LAST_ID: Final = (
    "If its topic was resized (`rsmq topic show`), publish to the partition that follows, and never delete this key. "
    "Else another program has written an entry with the highest id: when all groups have handled what is there, delete "
    "its key (DEL), and rsmq makes stream and groups again"
)


def as_reply(reply: Any) -> Any:
    """A reply; an error of redis-py as ours. NOSCRIPT stays: `Script` answers it."""
    return translate(reply) if isinstance(reply, RedisError) and not isinstance(reply, NoScriptError) else reply


def any_elsewhere(replies: Iterable[Any], *, is_node: bool = False) -> bool:
    """Whether one of these answers says that the right server may be another one by now. Errors may be redis-py's.

    A node of a cluster (`is_node`) is left for a slot that has moved, and stays the right one for the others.
    """
    for reply in replies:
        if isinstance(reply, Exception):
            error = translate(reply) if isinstance(reply, RedisError) else reply
            if isinstance(error, BrokerUnavailable) and (
                error.is_elsewhere or (isinstance(error, SlotMoved) and not is_node)
            ):
                return True
    return False


@contextmanager
def translated(url: str = "") -> Iterator[None]:
    """Raise our errors instead of redis-py's inside the block. NOSCRIPT passes: `Script` answers it."""
    try:
        yield
    except NoScriptError:
        raise
    except (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, IndexError) as error:
        raise translate(error, url) from error


Command = Sequence[Any]
Send = Callable[..., Awaitable[list[Any]]]
C = TypeVar("C")


class Client(redis.asyncio.Redis):
    """redis-py's client with raw replies, a bounded wait, no hidden retries and our errors.

    No retries: redis-py's own would repeat an XADD whose reply was lost, and so store it twice.
    `node_for(key)` is the client of one node: this client itself where there is only one server.
    """

    url: str = ""
    timeout: float = 5.0
    is_cluster: bool = False
    page_limit: PageLimit
    """What part of its usual size a page may have, for all that is read from this server or cluster."""
    is_node: bool = False
    """Whether it is one of the nodes of a cluster."""
    refusals: Refusals
    departures: int = 0
    """How often an answer was that the right server may be another one by now."""
    server_id: str = ""
    """Of the server process to which a connection was opened last. Empty if that is not known."""
    server_changes: int = 0
    """How often that was another one than before, after a failover or a restart: its last writes may be lost."""
    _server_watchers: tuple[Callable[[], None], ...] = ()
    _permits: asyncio.Semaphore

    def prepare(self, url: str, timeout: float, refusals: Refusals | None = None) -> Self:
        """Keep replies raw: remove the callbacks with which redis-py converts them."""
        self.url, self.timeout = url, timeout
        self.page_limit = PageLimit()
        self.refusals = Refusals() if refusals is None else refusals
        self._permits = asyncio.Semaphore(MOST_AT_ONCE)
        self.response_callbacks.clear()
        repair(self.connection_pool)
        return self

    # -- nodes (overridden by `ClusterClient`) -----------------------------------------------------

    @property
    def nodes(self) -> Sequence[Client]:
        """Every server that holds keys."""
        return (self,)

    def node_for(self, key: Key) -> Client:
        """The client of the server that holds a key, by the present slot map."""
        return self

    async def refresh(self) -> None:
        """Read the slot map again, if it is stale."""

    def watch_slots(self, call: Callable[[], None]) -> None:
        """Call it whenever `node_for` has another answer for some keys than before."""

    def mark_stale(self) -> None:
        """Mark the slot map as stale: a node may have been demoted without saying so."""

    def note_departure(self) -> None:
        """Let connections that only listen, and get no answers, look for the right server, too."""
        self.departures += 1

    def note_server(self, server_id: str) -> None:
        """A connection is open to this server process, and nothing was sent on it yet. Empty if that is not known."""
        if not server_id or server_id == self.server_id:
            return
        is_another, self.server_id = bool(self.server_id), server_id
        if is_another:
            self.server_changes += 1
            for call in self._server_watchers:
                call()

    @contextmanager
    def watching_server(self, call: Callable[[], None]) -> Iterator[None]:
        """Inside the block, call it when another server process answers, before anything is sent to that. Not on a
        cluster, where no single server has both."""
        self._server_watchers = (*self._server_watchers, call)
        try:
            yield
        finally:
            self._server_watchers = tuple(each for each in self._server_watchers if each != call)

    def note_error(self, error: BrokerError | ConfigError) -> None:
        """Update the slot map after an error of a connection to this server."""

    async def spread(self, commands: Sequence[tuple[Key, C]], send: Send) -> list[Any]:
        """`send(node, commands of that node, asking=...)` for every node; the replies in the order of the commands."""
        return await send(self, [command for _, command in commands], asking=False) if commands else []

    # -- commands ---------------------------------------------------------------------------------------------------

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            with translated(self.url):
                try:
                    async with self._permits:
                        with anyio.fail_after(self.timeout):
                            reply = await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
                except RedisError as error:
                    if any_elsewhere([error], is_node=self.is_node):
                        await self._leave()
                    raise
        except BrokerUnavailable as error:
            self.refusals.note((id(self), *args[:2]), error)
            raise
        if self.refusals:
            self.refusals.done((id(self), *args[:2]))
        return reply

    async def pipelined(self, commands: Sequence[Command], *, asking: bool = False) -> list[Any]:
        """Send commands together. An error in a reply is returned in its place; a lost connection is raised.

        `asking`: the commands are on a slot that this node is about to take over.
        """
        if not commands:
            return []
        try:
            with translated(self.url):
                async with self._permits, self.pipeline(transaction=False) as pipe:
                    with anyio.fail_after(self.timeout):
                        for command in commands:
                            if asking:
                                pipe.execute_command("ASKING")
                            pipe.execute_command(*command)
                        replies = await pipe.execute(raise_on_error=False)
                if any_elsewhere(replies, is_node=self.is_node):
                    await self._leave()
        except BrokerUnavailable as error:
            self.refusals.note((id(self), *commands[0][:2]), error)
            raise
        found = [as_reply(reply) for reply in replies[asking :: 1 + asking]]
        self._note(commands, found)
        return found

    def _note(self, commands: Sequence[Command], replies: Sequence[Any]) -> None:
        """Note which of the commands were refused for now."""
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, BrokerUnavailable):
                self.refusals.note((id(self), *command[:2]), reply)
            elif self.refusals:
                self.refusals.done((id(self), *command[:2]))

    async def _leave(self) -> None:
        self.note_departure()
        await self.close_idle()

    async def close_idle(self) -> None:
        """Close the idle connections: the next command asks anew which server is the right one."""
        await self.connection_pool.disconnect(inuse_connections=False)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        if isinstance(self.connection_pool, AsyncSentinelPool):
            for sentinel in self.connection_pool.sentinel_manager.sentinels:
                await sentinel.aclose()


class Packer:
    """Packs commands without redis-py's inspection of each argument, which costs more than the packing itself."""

    def pack(self, *command: Any) -> list[bytes]:
        """One command in the wire format; a name of two words is split."""
        return [packed(command)]


class Subscriber(PubSub):
    """Without redis-py's attempt to connect again before it raises an error: that may hang until a time-out.

    This overrides a private name; a test fails when it is gone.
    """

    def _reconnect(self, conn: Any, error: Exception | None = None, *_: Any, **__: Any) -> None:
        conn.disconnect()


class BlockingClient(redis.Redis):
    """A client for a thread: raw replies, no hidden retries. Its errors are redis-py's: wrap in `translated`."""

    is_cluster: bool = False

    def prepare(self) -> Self:
        """Keep replies raw."""
        self.response_callbacks.clear()
        return self

    def node_for(self, key: Key) -> BlockingClient:
        """The server that holds a key."""
        return self

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """One command. Raises an error reply."""
        try:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except RedisError as error:
            if any_elsewhere([error]):
                self.disconnect()
            raise

    def watch_slots(self, call: Callable[[], None]) -> None:
        """Call it whenever `node_for` has another answer for some keys than before."""

    def mark_stale(self) -> None:
        """Mark the slot map as stale: a node may have been demoted without saying so."""

    def pipelined(self, commands: Sequence[Command], *, asking: bool = False) -> list[Any]:
        """Send commands together. An error in a reply is returned in its place; a lost connection is raised.

        A script that the server does not have is sent again with its source.
        """
        replies = self._pipelined(commands, asking=asking)
        unknown = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        again = self._pipelined([with_source(commands[at]) for at in unknown], asking=asking)
        for at, reply in zip(unknown, again, strict=True):
            replies[at] = reply
        return replies

    def _pipelined(self, commands: Sequence[Command], *, asking: bool) -> list[Any]:
        if not commands:
            return []
        with self.pipeline(transaction=False) as pipe:
            for command in commands:
                if asking:
                    pipe.execute_command("ASKING")
                pipe.execute_command(*command)
            replies = list(pipe.execute(raise_on_error=False))[asking :: 1 + asking]
        if any_elsewhere(replies):
            self.disconnect()
        return replies

    def subscriber(self) -> PubSub:
        """A connection that listens to channels. When it breaks, it raises at once."""
        return Subscriber(self.connection_pool)

    def disconnect(self) -> None:
        """Close every connection: the server may be the wrong one by now."""
        self.connection_pool.disconnect()
