"""MQTT clients that may not connect: by client id, user or address, until an end. All gateways obey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final, Literal

from rsmq.errors import ConfigError
from rsmq.model.clock import LATEST_MS, from_epoch_ms, to_ms
from rsmq.model.keys import LONGEST_DEVICE, Keys
from rsmq.model.record import exact_text, whole
from rsmq.persistence.mqtt_clients import BROADCAST, order_frame
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import server_now_ms

BanKind = Literal["client", "user", "address"]
KINDS: Final[tuple[BanKind, ...]] = ("client", "user", "address")
BANS: Final = "mqtt-bans"
"""The header of the news that bans have changed."""
LONGEST_REASON: Final = 200


@dataclass(frozen=True, slots=True)
class Ban:
    """A client id, a user, or an address or network, that may not connect. `until`: None is without an end."""

    kind: BanKind
    name: str
    since: datetime
    until: datetime | None
    reason: str = ""


class MqttBans:
    """The bans of all gateways, on the server."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client, self._keys = client, keys

    async def put(self, kind: BanKind, name: str, span: timedelta | None, reason: str = "") -> Ban:
        """Ban a name from now on, for a time or without an end; another ban of the name is replaced.

        Gateways end its connections at once, with reason code 0x98, and refuse new ones with 0x8A; a gateway that has
        missed the news, within five seconds. Bans that have ended are removed. Raises ConfigError for a wrong name.
        """
        name, now_ms = checked(kind, name), await self._now_ms()
        if len(reason) > LONGEST_REASON or not reason.isprintable():
            raise ConfigError(f"the reason is one line of at most {LONGEST_REASON} characters")
        until_ms = 0 if span is None else min(now_ms + to_ms(span), LATEST_MS)
        ended = [field for field, ban in (await self._read()).items() if ban is not None and has_ended(ban, now_ms)]
        await self._change("HSET", f"{kind} {name}", f"{until_ms}|{now_ms}|{reason}")
        if ended:
            await self._client.execute_command("HDEL", self._keys.bans, *ended)
        return Ban(kind, name, from_epoch_ms(now_ms), from_epoch_ms(until_ms) if until_ms else None, reason)

    async def remove(self, kind: BanKind, name: str) -> bool:
        """End a ban. False if there is none. Raises ConfigError for a wrong name."""
        return bool(await self._change("HDEL", f"{kind} {checked(kind, name)}"))

    async def in_force(self) -> list[Ban]:
        """The bans that have not ended, by kind and name."""
        now_ms = await self._now_ms()
        found = [ban for ban in (await self._read()).values() if ban is not None and not has_ended(ban, now_ms)]
        return sorted(found, key=lambda ban: (ban.kind, ban.name))

    async def _read(self) -> dict[bytes, Ban | None]:
        flat = await self._client.execute_command("HGETALL", self._keys.bans)
        return {field: read_ban(field, value) for field, value in zip(flat[::2], flat[1::2], strict=True)}

    async def _change(self, command: str, *arguments: str) -> int:
        changed = await self._client.execute_command(command, self._keys.bans, *arguments)
        await BROADCAST(self._client, (self._keys.broadcast,), (order_frame(BANS, ""),))
        return int(changed)

    async def _now_ms(self) -> int:
        return await server_now_ms(self._client.node_for(self._keys.bans))

    def __repr__(self) -> str:
        return f"<MqttBans prefix={self._keys.prefix!r}>"


class BanList:
    """The bans in force, to be asked for each client that connects. No I/O."""

    def __init__(self, bans: Sequence[Ban] = ()) -> None:
        self._names = {(ban.kind, ban.name): ban for ban in bans}
        self._networks = [(ip_network(ban.name), ban) for ban in bans if ban.kind == "address"]

    def find(self, now_ms: int, client_id: str | None, user: str | None, address: str) -> Ban | None:
        """The ban that one of these falls under, or None. What is None or empty falls under none."""
        if not self._names:
            return None
        found = [self._names.get(("client", client_id or "")), self._names.get(("user", user or ""))]
        if self._networks and (ip := read_address(address)) is not None:
            found += [ban for network, ban in self._networks if ip in network]
        return next((ban for ban in found if ban is not None and not has_ended(ban, now_ms)), None)

    def __repr__(self) -> str:
        return f"<BanList {len(self._names)}>"


def read_address(text: str) -> IPv4Address | IPv6Address | None:
    """An address of a socket; None for what is none, such as the path of a unix socket."""
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, IPv6Address) else found


def has_ended(ban: Ban, now_ms: int) -> bool:
    """Whether a ban is over."""
    return ban.until is not None and ban.until <= from_epoch_ms(now_ms)


def checked(kind: BanKind, name: str) -> str:
    """The name of a ban as it is stored: of an address, its network. Raises ConfigError for a wrong one."""
    if kind == "address":
        try:
            return str(ip_network(name, strict=False))
        except ValueError:
            raise ConfigError(f"{name!r} is no address: use one such as 10.0.0.7, or a network 10.0.0.0/8") from None
    if not name or len(name.encode(errors="replace")) > LONGEST_DEVICE:
        raise ConfigError(f"{kind} {name[:60]!r} is not possible: it has 1 to {LONGEST_DEVICE} bytes")
    return name


def read_ban(field: bytes, value: bytes) -> Ban | None:
    """A ban as the server has it; None for what another client has written wrongly."""
    kind, _, name = (exact_text(field) or "").partition(" ")
    until, _, rest = (exact_text(value) or "").partition("|")
    since, _, reason = rest.partition("|")
    until_ms, since_ms = whole(until), whole(since)
    if kind not in KINDS or until_ms is None or since_ms is None:
        return None
    try:
        checked(kind, name)
    except ConfigError:
        return None
    end = from_epoch_ms(min(until_ms, LATEST_MS)) if until_ms else None
    return Ban(kind, name, from_epoch_ms(min(since_ms, LATEST_MS)), end, reason)
