"""The MQTT clients of all gateways, for operators: who is connected where, and the end of a connection.

Gateways keep what is read here on the server. So it needs nothing of them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import anyio
from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from rsmq.model.clock import LATEST_MS, from_epoch_ms
from rsmq.model.keys import Keys
from rsmq.model.message import write_headers
from rsmq.model.mqtt_subscription import SHARDS, Subscription, shard_of, unpack
from rsmq.model.record import device_id, exact_text, moment, text, whole
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import Script
from rsmq.redis.streams import ask_all, server_now_ms

BROADCAST: Final = Script("persistence/broadcast")
KICK: Final = "mqtt-kick"
"""The header of a request to end the connection of a client."""
PUBLISHED: Final = b"published"
"""The field of a will that has been published just now."""
PAGE: Final = 500
POLL: Final = 0.05
FIELDS: Final = ("gateway", "connected_ms", "seen_ms", "mqtt", "dropped")


@dataclass(frozen=True, slots=True)
class MqttConnection:
    """A connection as its gateway has noted it. `keep_alive`: seconds, 0 for none."""

    address: str = ""
    user: str | None = None
    level: int = 0
    is_bridge: bool = False
    keep_alive: int = 0

    @property
    def protocol(self) -> str:
        """The version of MQTT, in words; empty if it is not known."""
        version = {3: "MQTT 3.1", 4: "MQTT 3.1.1", 5: "MQTT 5"}.get(self.level, "")
        return f"{version}, as a bridge" if version and self.is_bridge else version

    def packed(self) -> bytes:
        """As the server keeps it."""
        return to_json(self)

    @classmethod
    def read(cls, entry: bytes | None) -> MqttConnection | None:
        """From an entry of the clients of a gateway; None if it has none that can be read."""
        raw = (entry or b"").partition(b":")[2].partition(b":")[2]
        try:
            return CONNECTION.validate_json(raw) if raw else None
        except ValueError:  # another client, or an older gateway, has written it
            return None


CONNECTION: Final = TypeAdapter(MqttConnection)


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
    dropped: int
    """Letters that had to make room for newer ones."""
    has_will: bool
    subscriptions: tuple[Subscription, ...]


@dataclass(frozen=True, slots=True)
class MqttGateway:
    """A gateway with a lease. `until`: when it runs out, unless it is renewed."""

    name: str
    clients: int
    until: datetime
    is_late: bool
    """Its lease has run out, and no other gateway has ended its connections yet."""
    listen: tuple[str, ...] = ()
    is_anonymous: bool = False
    certificate_until: datetime | None = None
    routes: tuple[tuple[str, str, bool], ...] = ()
    """Filter, topic, and whether MQTT clients that have subscribed get what it matches."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What it has counted since it started."""
    started: datetime | None = None
    held: Mapping[str, int] = field(default_factory=dict)
    """Clients whose letters wait, by what these need, such as `key k7`, which the gateway does not have."""


class MqttClients:
    """The MQTT clients of all gateways, as the server knows them."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client, self._keys = client, keys

    async def gateways(self) -> list[MqttGateway]:
        """All gateways that have a lease, or had one and are not removed yet."""
        ask = self._client.execute_command
        flat = await ask("ZRANGEBYSCORE", self._keys.gateways, "-inf", "+inf", "WITHSCORES")
        leases = list(read_leases(flat))
        if not leases:
            return []
        names = [name for name, _ in leases]
        numbers = await ask_all(self._client, [("HLEN", self._keys.gateway_clients(name)) for name in names])
        now_ms = await server_now_ms(self._client.node_for(self._keys.gateways))
        untils = [until for _, until in leases]
        said = await ask_all(self._client, [("GET", self._keys.gateway_about(name)) for name in names])
        return [
            MqttGateway(name, number, from_epoch_ms(until), until < now_ms, *read_about(raw))
            for name, number, until, raw in sorted(zip(names, numbers, untils, said, strict=True))
        ]

    async def some_with_subscriptions(self, most: int) -> list[str]:
        """Clients that have subscriptions, connected or not, in no order."""
        found = list[str]()
        for shard in range(SHARDS):
            command = ("HSCAN", self._keys.mqtt(shard, "subscriptions"), 0, "COUNT", most // SHARDS)
            _, flat = await self._client.execute_command(*command)
            pairs = zip(flat[::2], flat[1::2], strict=True)
            found += filter(None, (device_id(name) for name, entry in pairs if not entry.endswith(b"|")))
        return found[:most]

    async def connected(self) -> AsyncGenerator[tuple[str, str], None]:
        """The connected clients, each with its gateway, in no order."""
        flat = await self._client.execute_command("ZRANGEBYSCORE", self._keys.gateways, "-inf", "+inf", "WITHSCORES")
        for gateway, _ in read_leases(flat):
            cursor = b"0"
            while True:
                command = ("HSCAN", self._keys.gateway_clients(gateway), cursor, "COUNT", PAGE)
                cursor, flat = await self._client.execute_command(*command)
                for each in filter(None, map(device_id, flat[::2])):  # an empty one: this gateway is being ended
                    yield each, gateway
                if cursor == b"0":
                    break

    async def find(self, client_id: str) -> MqttClient | None:
        """A client with its session, or None."""
        return (await self.find_all([client_id]))[0]

    async def connection(self, client: MqttClient) -> MqttConnection | None:
        """How a client is connected; None if it is not, or its gateway has not noted it."""
        if client.gateway is None:
            return None
        key = self._keys.gateway_clients(client.gateway)
        return MqttConnection.read(await self._client.execute_command("HGET", key, client.client_id))

    async def find_all(self, client_ids: Sequence[str]) -> list[MqttClient | None]:
        """Clients with their sessions, in one exchange; None for one that is not known."""
        keys, commands = self._keys, list[tuple[Any, ...]]()
        for name in client_ids:
            commands += (
                ("HMGET", keys.session(name), *FIELDS), ("ZCARD", keys.inbox(name)),
                ("HGET", keys.will(name), PUBLISHED), ("HLEN", keys.will(name)),
                ("HGET", keys.mqtt(shard_of(name), "subscriptions"), name),
            )  # fmt: skip
        found = await ask_all(self._client, commands)
        return [read_client(name, *found[at * 5 : at * 5 + 5]) for at, name in enumerate(client_ids)]

    async def kick(self, client_id: str, wait: float) -> bool:
        """End the connection of a client, with reason code 0x98. Its session and its will go on as the standard says.

        Returns False if it is not connected. Raises TimeoutError if no gateway has ended it in so many seconds.
        """
        session = self._keys.session(client_id)
        before = await self._client.execute_command("HMGET", session, "gateway", "epoch", "mqtt")
        if before[0] is None or before[2] is None:
            return False
        await BROADCAST(self._client, (self._keys.broadcast,), (order_frame(KICK, client_id),))
        with anyio.fail_after(wait):
            while before == await self._client.execute_command("HMGET", session, "gateway", "epoch", "mqtt"):
                await anyio.sleep(POLL)
        return True

    def __repr__(self) -> str:
        return f"<MqttClients prefix={self._keys.prefix!r}>"


def read_client(
    name: str, session: Sequence[bytes | None], waiting: int, published: bytes | None, wills: int, raw: bytes | None
) -> MqttClient | None:
    """A client from what the server has; None if it has no MQTT session.

    `wills` counts the fields of its wills, with the head of the one that has just been `published`, if there is one.
    """
    gateway, connected, seen, expiry, dropped = session
    if expiry is None:
        return None
    try:
        found, _ = unpack(raw.partition(b"|")[2] if raw else b"")
    except ValueError:  # another client has written it
        found = []
    return MqttClient(
        name, text(gateway) or None, moment(connected), moment(seen), whole(expiry) or 0, waiting,
        whole(dropped) or 0, wills > (published is not None), tuple(found),
    )  # fmt: skip


def read_about(raw: bytes | None) -> tuple[Any, ...]:
    """A gateway's own description, as the last fields of `MqttGateway`."""
    try:
        found = from_json(raw or b"{}")
        until = found.get("certificate_until")
        routes = tuple((str(pattern), str(topic), bool(has)) for pattern, topic, has in found.get("routes", ()))
        listen = tuple(map(str, found.get("listen", ())))
        counts = {str(name): int(number) for name, number in found.get("counts", {}).items()}
        end = None if until is None else from_epoch_ms(int(until))
        started = found.get("started_ms")
        begin = None if started is None else from_epoch_ms(int(started))
        held = {str(name): int(number) for name, number in found.get("held", {}).items()}
        return listen, bool(found.get("anonymous")), end, routes, counts, begin, held
    except (ValueError, TypeError, AttributeError, OverflowError, OSError):  # another client may write anything
        return ()


def order_frame(name: str, value: str) -> bytes:
    """An order to all gateways, such as the end of the connection of a client."""
    headers = write_headers({name: value})
    return b"\0%b%b" % (len(headers).to_bytes(2, "big"), headers)


def read_leases(flat: Sequence[bytes]) -> Iterator[tuple[str, int]]:
    """Each gateway, and when its lease ends in ms, from the set of gateways; what names none is left out."""
    for raw, score in zip(flat[::2], flat[1::2], strict=True):
        name, until = exact_text(raw), float(score)
        if name is not None:
            yield name, int(min(max(until, 0), LATEST_MS)) if until == until else 0
