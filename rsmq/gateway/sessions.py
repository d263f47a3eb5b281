"""The ends of connections and sessions: of this gateway's clients, of those that expire, and of dead gateways."""

from __future__ import annotations

import logging
from typing import Final

from rsmq.errors import SessionTaken
from rsmq.gateway.registry import SHARDS, Registry, shard_of
from rsmq.gateway.scripts import BEAT_GATEWAY, END_MQTT_SESSION
from rsmq.model.keys import Keys
from rsmq.redis.connector import Client
from rsmq.redis.script_batcher import ScriptBatcher
from rsmq.redis.scripts import CLOSE_SESSION, OK

log = logging.getLogger("rsmq.gateway")

CHUNK: Final = 1000
PAGE: Final = 100


class Sessions:
    """What outlives a connection. Every step names the epoch of the connection that ended.

    So each may be repeated, by any gateway and at any time: a client that has connected again is not touched. This is
    why the survivors of a dead gateway need no agreement about who ends its connections.
    """

    def __init__(self, client: Client, keys: Keys, batcher: ScriptBatcher, registry: Registry, gateway: str) -> None:
        self._client, self._keys, self._batcher, self._registry = client, keys, batcher, registry
        self.gateway = gateway
        self.now_ms = 0

    @property
    def _clients(self) -> str:
        return self._keys.gateway_clients(self.gateway)

    async def opened(self, client: str, epoch: str, expiry: int) -> None:
        """A client has connected here: if this gateway dies, the others end its connection."""
        await self._client.execute_command("HSET", self._clients, client, f"{epoch}:{expiry}")

    async def closed(self, client: str, epoch: str, expiry: int, gateway: str | None = None) -> None:
        """A connection has ended. Its session ends with it, or is kept for `expiry` seconds."""
        clients = self._clients if gateway is None else self._keys.gateway_clients(gateway)
        if expiry:
            await self._batcher.submit(CLOSE_SESSION, (self._keys.session(client),), (epoch,))
            due = self._keys.mqtt(shard_of(client), "sessions")
            await self._client.execute_command("ZADD", due, self.now_ms + expiry * 1000, f"{epoch}:{client}")
        else:
            await self.end(client, epoch)
        # a later connection of the same client may have its own entry by now
        value = await self._client.execute_command("HGET", clients, client)
        if value is not None and value.partition(b":")[0] == epoch.encode():
            await self._client.execute_command("HDEL", clients, client)

    async def end(self, client: str, epoch: str) -> None:
        """Remove a session with all that it has, unless its client has connected again."""
        try:
            await self._registry.write(client, epoch, ())
        except SessionTaken:
            return
        left = 1
        while left:
            keys = (*self._keys.device(client)[:3], self._keys.received(client))
            reply = await self._batcher.submit(END_MQTT_SESSION, keys, (epoch, CHUNK))
            if reply[0] != OK:
                return
            left = reply[1]

    async def sweep(self) -> None:
        """End the sessions that have expired."""
        for shard in range(SHARDS):
            due = self._keys.mqtt(shard, "sessions")
            found = await self._client.execute_command("ZRANGEBYSCORE", due, "-inf", self.now_ms, "LIMIT", 0, PAGE)
            for member in found:
                epoch, _, client = member.decode().partition(":")
                await self.end(client, epoch)
                await self._client.execute_command("ZREM", due, member)

    async def beat(self, ttl_ms: int, *, new: bool = False) -> list[str] | None:
        """Renew the lease of this gateway. Returns those whose lease has run out, or None if that is its own."""
        reply = await BEAT_GATEWAY(self._client, (self._keys.gateways,), (self.gateway, ttl_ms, int(new)))
        self.now_ms = int(reply[1])
        return None if reply[0] != OK else [each.decode() for each in reply[2:]]

    async def bury(self, gateway: str) -> None:
        """End the connections of a gateway that is dead, in pages, and forget it."""
        clients, ended = self._keys.gateway_clients(gateway), 0
        cursor = b"0"
        while True:
            cursor, flat = await self._client.execute_command("HSCAN", clients, cursor, "COUNT", PAGE)
            for client, value in zip(flat[::2], flat[1::2], strict=True):
                epoch, _, expiry = value.decode().partition(":")
                await self.closed(client.decode(), epoch, int(expiry), gateway)
                ended += 1
            if cursor == b"0":
                break
        await self._client.execute_command("DEL", clients)
        await self._client.execute_command("ZREM", self._keys.gateways, gateway)
        log.warning("gateway %s is gone: ended its %d connections", gateway, ended)

    def __repr__(self) -> str:
        return f"<Sessions of {self.gateway}>"
