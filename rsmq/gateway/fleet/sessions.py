"""The ends of connections and sessions: of this gateway's clients, of those that expire, and of dead gateways."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple

from pydantic_core import from_json

from rsmq.errors import BrokerError, BrokerUnavailable, SessionTaken
from rsmq.gateway.fleet.registry import Registry
from rsmq.gateway.fleet.scripts import (
    BEAT_GATEWAY,
    CLOSE_MQTT_SESSION,
    END_MQTT_SESSION,
    FORGET_CLIENT,
    FORGET_END,
    NOTE_CLIENT,
    NOTE_END,
)
from rsmq.gateway.fleet.shares import Shares
from rsmq.gateway.fleet.suspects import SILENT_MS, Renewal
from rsmq.gateway.fleet.wills import Wills, read_member
from rsmq.model.clock import ServerClock, monotonic
from rsmq.model.keys import Keys
from rsmq.model.log_names import name_in_log
from rsmq.model.mqtt_subscription import SHARDS, shard_of
from rsmq.model.record import device_id, exact_text, whole
from rsmq.persistence.mqtt_clients import read_leases
from rsmq.redis.client.connector import Client
from rsmq.redis.client.script_batcher import ScriptBatcher
from rsmq.redis.pubsub import listeners
from rsmq.redis.scripts import OK
from rsmq.redis.streams import ask_all

log = logging.getLogger("rsmq.gateway")

CHUNK: Final = 1000
SHARED, NONE = b"SHARED", b"NONE"
"""What the registry says when it removes subscriptions: some of them were shared, or there were none."""
PAGE: Final = 500
SLACK_MS: Final = 60_000
GONE: Final = b""
"""The field of a gateway's list of clients that says that the others have ended them. No client id is empty."""
LONGEST_EXPIRY: Final = 0xFFFFFFFF
"""Of a session, in seconds."""
GONE_MS: Final = 3_600_000
"""How long that is remembered: far longer than a paused gateway takes to read it."""


class Ended(NamedTuple):
    """A connection that has ended. `keeps_will`: its client did not say goodbye.

    `has_shares`: it has shared subscriptions.
    """

    client: str
    epoch: str
    expiry: int
    keeps_will: bool
    has_shares: bool


class Sessions:
    """Sessions outlive their connections. Every step names the epoch of the connection that ended.

    So each may be repeated, by any gateway and at any time: a client that has connected again is not touched. This is
    why the survivors of a dead gateway need no agreement about who ends its connections.
    """

    def __init__(
        self, client: Client, keys: Keys, batcher: ScriptBatcher, registry: Registry, shares: Shares, wills: Wills,
        gateway: str, clock: ServerClock, spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:  # fmt: skip
        self._client = client
        self._keys = keys
        self._batcher = batcher
        self._registry = registry
        self._shares = shares
        self._wills = wills
        self._clock = clock
        self._spawn = spawn
        self.gateway = gateway
        """The name of this gateway; a new one when its lease was lost."""
        self.known = 0
        """Sessions of the whole fleet, as of the last `count`, and those that have begun and ended here since."""
        self._unfinished: list[Ended] = []
        """Ends that `sweep` has to store."""
        self._leaving: dict[str, asyncio.Event] = {}
        """Clients whose last connection is not stored as ended yet."""

    def rename(self) -> None:
        """The others have ended the connections of this gateway: it goes on under a new name."""
        self.gateway = f"{instance_of(self.gateway)}~{secrets.token_hex(4)}"

    @property
    def _clients(self) -> str:
        return self._keys.gateway_clients(self.gateway)

    def note(self, client: str, epoch: str, expiry: int, about: bytes = b"{}") -> asyncio.Future[Any]:
        """A client connects here: if this gateway dies, the others end its connection. `noted` must get the reply.

        `about`: its connection as operators see it, see `MqttConnection`.
        """
        call = self._batcher.submit(
            NOTE_CLIENT, (self._clients,), (client, b"%b:%d:%b" % (epoch.encode(), expiry, about))
        )
        # also if what is done beside it fails, so that nothing awaits it
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        return call

    async def noted(self, call: asyncio.Future[Any]) -> None:
        """Raises BrokerUnavailable if the others have ended the connections of this gateway already: they would not
        find this one."""
        if await call != OK:
            raise BrokerUnavailable("this gateway was away for longer than its lease")

    async def has(self, client: str) -> bool:
        """Whether a client has a session."""
        return await self._client.execute_command("HGET", self._keys.session(client), "mqtt") is not None

    async def count(self) -> None:
        """Count the sessions of the whole fleet: those without a connection, and the connections."""
        flat = await self._client.execute_command("ZRANGEBYSCORE", self._keys.gateways, "-inf", "+inf", "WITHSCORES")
        asked = [("HLEN", self._keys.gateway_clients(name)) for name, _ in read_leases(flat)]
        asked += [("ZCARD", self._keys.mqtt(shard, "sessions")) for shard in range(SHARDS)]
        self.known = sum(await ask_all(self._client, asked))

    def resumed(self, client: str, epoch: str) -> None:
        """A session goes on: the end that its last connection has noted is forgotten. Else it stays until it is due.

        `epoch`: that of the last connection, empty if it is not known.
        """
        if not epoch:
            return
        key = self._keys.mqtt(shard_of(client), "sessions")
        self._batcher.submit(FORGET_END, (key,), (f"{epoch}:{client}",)).add_done_callback(asyncio.Future.exception)

    def began(self, *, is_new: bool) -> None:
        """A client has connected. `is_new`: it had no session."""
        self.known += is_new

    def leave(self, ended: Ended, settled: Callable[[], Awaitable[None]]) -> None:
        """Store that a connection has ended, when the server knows all that its client has acknowledged."""
        self._leaving[ended.client] = left = asyncio.Event()
        self._spawn(self._leave(ended, settled, left))

    async def _leave(self, ended: Ended, settled: Callable[[], Awaitable[None]], left: asyncio.Event) -> None:
        try:
            await settled()
            await self.closed(ended)
        except BrokerError as error:
            log.warning("the end of client %s waits for the server: %s", name_in_log(ended.client), error)
            self.close_later(ended)
        finally:
            left.set()
            if self._leaving.get(ended.client) is left:
                del self._leaving[ended.client]

    async def left(self, client: str) -> None:
        """Wait until the end of a client's last connection here is stored, if it has ended."""
        if (leaving := self._leaving.get(client)) is not None:
            await leaving.wait()

    async def closed(self, ended: Ended) -> None:
        """A connection has ended. Its session ends with it, or is kept for its expiry; its will waits for its delay."""
        await self._close_all([ended], self._clients)

    async def _close_all(self, ended: Sequence[Ended], clients: str) -> None:
        """Store the ends of many connections: the calls of each step share their writes."""
        replies = await asyncio.gather(*(self._close(each) for each in ended))
        delays = [delay for _, delay in replies]
        noted = (self._note_end(each, delay) for each, delay in zip(ended, delays, strict=True))
        await asyncio.gather(*(call for call in noted if call is not None))
        await asyncio.gather(*(self.end(each.client, each.epoch) for each in ended if not each.expiry))
        await self._set_offline([each for each in ended if each.expiry and each.has_shares])
        forgotten = (self._batcher.submit(FORGET_CLIENT, (clients,), (each.client, each.epoch)) for each in ended)
        await asyncio.gather(*forgotten)
        due = [(each.epoch, each.client) for each, delay in zip(ended, delays, strict=True) if delay == 0]
        await self._wills.publish(due)

    def _note_end(self, ended: Ended, delay: int) -> asyncio.Future[Any] | None:
        """Note when its will is due, and when its session expires."""
        if delay < 0 and not ended.expiry:
            return None
        now, shard = self._clock.now_ms(), shard_of(ended.client)
        keys = (self._keys.mqtt(shard, "wills"), self._keys.mqtt(shard, "sessions"))
        due = now + delay * 1000 if delay >= 0 else ""
        expires = now + ended.expiry * 1000 if ended.expiry else ""
        return self._batcher.submit(NOTE_END, keys, (f"{ended.epoch}:{ended.client}", due, expires))

    def _close(self, ended: Ended) -> asyncio.Future[Any]:
        client, epoch, expiry, keeps_will, _ = ended
        inbox, session, expiries, _ = self._keys.device(client)
        keys = (session, inbox, expiries, self._keys.received(client), self._keys.will(client))
        args = (epoch, expiry, expiry * 1000 + SLACK_MS, int(keeps_will))
        return self._batcher.submit(CLOSE_MQTT_SESSION, keys, args)

    def close_later(self, ended: Ended) -> None:
        """`sweep` ends this connection: the server was away when it ended, or it has not begun."""
        self._unfinished.append(ended)

    async def end(self, client: str, epoch: str) -> None:
        """Remove a session with all that it has, unless its client has connected again.

        Another gateway may do the same, or has died in the middle of it: then its subscriptions are removed already,
        and what it has left is passed on all the same.
        """
        try:
            removed = await self._registry.write(client, epoch, ())
        except SessionTaken:
            return
        may_share = removed in (SHARED, NONE)
        left = await self._remove(client, epoch, 0 if may_share else CHUNK)
        if left and may_share:
            await self._shares.pass_on(client)
        while left:
            left = await self._remove(client, epoch, CHUNK)
        if left is None:
            return
        self.known -= 1

    async def _remove(self, client: str, epoch: str, count: int) -> int | None:
        """Remove so many letters of a session, which ends with the last one. Returns how many are left, or None if its
        client has connected again."""
        keys = (*self._keys.device(client)[:3], self._keys.received(client))
        reply = await self._batcher.submit(END_MQTT_SESSION, keys, (epoch, count))
        return reply[1] if reply[0] == OK else None

    async def _set_offline(self, ended: Sequence[Ended]) -> None:
        """Clients with shared subscriptions are not connected any more: other members come first."""
        for each in await self._registry.with_shares([(each.client, each.epoch) for each in ended]):
            with contextlib.suppress(SessionTaken):
                await self._registry.write(*each, is_online=False)

    async def sweep(self) -> None:
        """End the sessions that have expired."""
        while self._unfinished:
            await self.closed(self._unfinished[0])
            del self._unfinished[0]
        for shard in range(SHARDS):
            due = self._keys.mqtt(shard, "sessions")
            while await self._end_page(due) == PAGE:
                pass

    async def _end_page(self, due: str) -> int:
        """End a page of sessions that have expired. Returns how many entries it had."""
        found = await self._client.execute_command("ZRANGEBYSCORE", due, "-inf", self._clock.now_ms(), "LIMIT", 0, PAGE)
        ended = [(member, read_member(member)) for member in found]
        for foreign in (member for member, each in ended if each is None):
            log.warning("removed from %s what names no session: %r", due, foreign[:60])
        await asyncio.gather(*(self.end(client, epoch) for epoch, client in (each for _, each in ended if each)))
        if found:
            await self._client.execute_command("ZREM", due, *found)
        return len(found)

    async def beat(self, ttl_ms: int, *, new: bool = False, of_all: bool = False) -> Renewal | None:
        """Renew the lease of this gateway. Returns what that has shown, or None if its own lease has run out.

        `of_all`: return the leases of all others, too. The connection of a process that was killed is closed at once.
        One that is paused or cut off keeps its lease.
        """
        args = (self.gateway, ttl_ms, int(new), 0 if of_all else SILENT_MS)
        asked = monotonic()
        reply = await BEAT_GATEWAY(self._client, (self._keys.gateways,), args)
        now = int(reply[1])
        self._clock.saw(asked, now / 1000)
        if reply[0] != OK:
            return None
        leases = dict(read_leases(reply[2:]))
        await self._remove_foreign(reply[2::2])
        silent = [each for each, until in leases.items() if until < now + ttl_ms - SILENT_MS]
        open_ = [each for each in silent if leases[each] >= now]
        counts = await listeners(self._client, [self._keys.gateway_alive(instance_of(each)) for each in open_])
        present = {each for each, count in zip(open_, counts, strict=True) if count}
        return Renewal(leases, [each for each in silent if each not in present])

    async def _remove_foreign(self, names: Sequence[bytes]) -> None:
        """What names no gateway was written by another client, and is never renewed."""
        if found := [name for name in names if exact_text(name) is None]:
            log.warning("removed what names no gateway: %s", ", ".join(repr(each[:60]) for each in found))
            await self._client.execute_command("ZREM", self._keys.gateways, *found)

    @property
    def server(self) -> str:
        """The server process that has the leases: this gateway listens there. Empty if it may not know."""
        return self._client.node_for(self._keys.gateways).server_id

    async def last_server(self, gateway: str) -> str:
        """The server process to which another gateway was connected last. Empty if that is not known."""
        return server_of(await self._client.execute_command("GET", self._keys.gateway_about(gateway)))

    async def bury(self, gateway: str) -> None:
        """End the connections of a gateway that is dead, a page at a time, and forget it.

        It may only be paused, and go on: the mark comes first, so that it knows of every connection that is not found.
        """
        clients, ended = self._keys.gateway_clients(gateway), 0
        await self._client.execute_command("HSET", clients, GONE, "1")
        cursor = b"0"
        while True:
            cursor, flat = await self._client.execute_command("HSCAN", clients, cursor, "COUNT", PAGE)
            found = [read_end(*each) for each in zip(flat[::2], flat[1::2], strict=True) if each[0] != GONE]
            if None in found:
                log.warning("%d entries of %s name no connection, and are left out", found.count(None), clients)
            await self._close_all([each for each in found if each is not None], clients)
            ended += len(found)
            if cursor == b"0":
                break
        await self._client.execute_command("PEXPIRE", clients, GONE_MS)
        await self._client.execute_command("ZREM", self._keys.gateways, gateway)
        log.warning("gateway %s is gone: ended its %d connections", gateway, ended)

    def __repr__(self) -> str:
        return f"<Sessions of {self.gateway}>"


def read_end(raw: bytes, entry: bytes) -> Ended | None:
    """The end of a client that was connected to a dead gateway: its will is kept. None: another client wrote it."""
    epoch, _, rest = entry.partition(b":")
    expiry = rest.partition(b":")[0]
    client, seconds = device_id(raw), whole(expiry)
    if client is None or whole(epoch) is None or seconds is None or seconds > LONGEST_EXPIRY:
        return None
    return Ended(client, epoch.decode(), seconds, keeps_will=True, has_shares=True)


def instance_of(gateway: str) -> str:
    """The process of a gateway: one that starts anew has a new name, and the same connection."""
    return gateway.partition("~")[0]


def server_of(said: bytes | None) -> str:
    """The server process to which a gateway that has said this was connected. Empty if that is not known."""
    try:
        return str(from_json(said or b"{}").get("server", ""))
    except (ValueError, AttributeError):  # another client may write anything
        return ""
