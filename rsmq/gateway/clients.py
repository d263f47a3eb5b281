"""What an operator asks about MQTT clients: who is connected where, and the end of a connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import anyio

from rsmq.gateway.broadcast import kick_frame
from rsmq.gateway.packet import Subscription
from rsmq.gateway.registry import shard_of, unpack
from rsmq.gateway.scripts import BROADCAST
from rsmq.model.clock import from_epoch_ms
from rsmq.model.keys import Keys
from rsmq.redis.connector import Client

PAGE: Final = 500
POLL: Final = 0.05


@dataclass(frozen=True, slots=True)
class MqttClient:
    """A client that is connected, or whose session is kept. `expiry` is that of its session, in seconds."""

    client_id: str
    gateway: str | None
    connected_at: datetime | None
    seen_at: datetime | None
    expiry: int
    waiting: int
    """Letters in its inbox."""
    has_will: bool
    subscriptions: tuple[Subscription, ...]


class MqttClients:
    """The MQTT clients of all gateways, as the server knows them."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client, self._keys = client, keys

    async def connected(self) -> AsyncIterator[tuple[str, str]]:
        """The connected clients, each with its gateway, in no order."""
        for name in await self._client.execute_command("ZRANGE", self._keys.gateways, 0, -1):
            gateway, cursor = name.decode(), b"0"
            while True:
                command = ("HSCAN", self._keys.gateway_clients(gateway), cursor, "COUNT", PAGE)
                cursor, flat = await self._client.execute_command(*command)
                for each in flat[::2]:
                    yield each.decode(), gateway
                if cursor == b"0":
                    break

    async def find(self, client_id: str) -> MqttClient | None:
        """A client with its session, or None."""
        wanted = ("gateway", "connected_ms", "seen_ms", "mqtt")
        ask = self._client.execute_command
        gateway, connected, seen, expiry = await ask("HMGET", self._keys.session(client_id), *wanted)
        if expiry is None:
            return None
        key = self._keys.mqtt(shard_of(client_id), "subscriptions")
        raw = await ask("HGET", key, client_id)
        found, _ = unpack(raw.partition(b"|")[2] if raw else b"")
        return MqttClient(
            client_id, gateway.decode() if gateway else None, moment(connected), moment(seen), int(expiry),
            await ask("ZCARD", self._keys.inbox(client_id)), bool(await ask("EXISTS", self._keys.will(client_id))),
            tuple(found),
        )  # fmt: skip

    async def kick(self, client_id: str, wait: float) -> bool:
        """End the connection of a client, with reason code 0x98. Its session and its will go on as the standard says.

        Returns False if it is not connected. Raises TimeoutError if no gateway has ended it in so many seconds.
        """
        session = self._keys.session(client_id)
        before = await self._client.execute_command("HMGET", session, "gateway", "epoch")
        if before[0] is None:
            return False
        await BROADCAST(self._client, (self._keys.broadcast,), (kick_frame(client_id),))
        with anyio.fail_after(wait):
            while before == await self._client.execute_command("HMGET", session, "gateway", "epoch"):
                await anyio.sleep(POLL)
        return True

    def __repr__(self) -> str:
        return f"<MqttClients prefix={self._keys.prefix!r}>"


def moment(raw: bytes | None) -> datetime | None:
    """A time of the server, or None."""
    return None if raw is None else from_epoch_ms(int(raw))
