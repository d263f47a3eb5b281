"""Devices as an operator sees them: what is stored for whom, who is connected, what was dropped. No session needed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rsmq.clock import LATEST_MS, from_epoch_ms
from rsmq.connect import Client
from rsmq.errors import ConfigError
from rsmq.keys import Keys, decode_device
from rsmq.persistence.letter import Letter, packet_id_of
from rsmq.script import CLEAR_INBOX

CHUNK: Final = 1000
SCAN_COUNT: Final = 1000
MOST_PEEKED: Final = 1000
LONGEST_NUMBER: Final = 17


@dataclass(frozen=True, slots=True)
class Device:
    """One device's state. `backlog` counts the stored letters, expired ones included until they are met.

    `gateway` and `connected_at` are None while it is not connected; a gateway that died leaves them behind.
    """

    client_id: str
    backlog: int
    seq: int
    last_packet_id: int
    epoch: int
    gateway: str | None
    connected_at: datetime | None
    seen_at: datetime | None
    received: int
    dropped: int
    expired: int
    late: int


class Devices:
    """Questions about devices, and the one command that empties an inbox."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client, self._keys = client, keys

    async def find(self, client_id: str) -> Device | None:
        """A device's state; None when nothing is known of it."""
        inbox, session, *_ = self._keys.device(client_id)
        flat = await self._client.execute_command("HGETALL", session)
        if not flat:
            return None
        return read_device(client_id, flat, await self._client.execute_command("ZCARD", inbox))

    async def names(self) -> AsyncIterator[str]:
        """The ids of all known devices, in no order; one that comes or goes meanwhile may be missing or twice."""
        async for page in self._pages():
            for name in page:
                yield name

    async def iterate(self) -> AsyncIterator[Device]:
        """The state of every known device."""
        async for page in self._pages():
            commands: list[tuple[str, str]] = []
            for name in page:
                commands += (("HGETALL", self._keys.session(name)), ("ZCARD", self._keys.inbox(name)))
            replies = await self._client.pipelined(commands)
            for name, flat, backlog in zip(page, replies[::2], replies[1::2], strict=True):
                for reply in (flat, backlog):
                    if isinstance(reply, Exception):
                        raise reply
                if flat:
                    yield read_device(name, flat, backlog)

    async def _pages(self) -> AsyncIterator[list[str]]:
        """Device ids as the scan of each node finds them."""
        front, back = f"{self._keys.prefix}:{{", "}_session"
        options = ("MATCH", f"{front}*{back}", "COUNT", SCAN_COUNT, "TYPE", "hash")
        await self._client.refresh()
        for node in self._client.nodes:
            cursor = b"0"
            while True:
                cursor, found = await node.execute_command("SCAN", cursor, *options)
                if found:
                    yield [decode_device(name.decode()[len(front) : -len(back)]) for name in found]
                if cursor == b"0":
                    break

    async def peek(self, client_id: str, after: int = 0, count: int = 10) -> list[Letter]:
        """Letters after a seq, in order, without a session: nothing changes by it."""
        if not 1 <= count <= MOST_PEEKED:
            raise ConfigError(f"count={count} is not possible: use 1 to {MOST_PEEKED} letters")
        inbox = self._keys.inbox(client_id)
        refs = await self._client.execute_command("ZRANGEBYSCORE", inbox, f"({after}", "+inf", "LIMIT", 0, count)
        if not refs:
            return []
        envelopes = await self._client.execute_command("MGET", *(f"{inbox}_{ref.decode()}" for ref in refs))
        return [
            Letter(int(ref), envelope) for ref, envelope in zip(refs, envelopes, strict=True) if envelope is not None
        ]

    async def purge(self, client_id: str) -> int:
        """Remove what is stored for a device now, in bounded steps; returns how many letters that were.

        A connected session goes on, with what comes afterwards.
        """
        inbox, session, expiry, _ = self._keys.device(client_id)
        removed, left, everything = 0, 1, 1
        while left:
            _, number, left = await CLEAR_INBOX(self._client, (inbox, session, expiry), (everything, CHUNK))
            removed, everything = removed + number, 0
        return int(removed)


def read_device(client_id: str, flat: list[bytes], backlog: int) -> Device:
    """The session hash, field and value in turn, as a device."""
    state = dict(zip(flat[::2], flat[1::2], strict=True))

    def number(field: bytes) -> int:
        raw = state.get(field, b"")
        return int(raw) if raw.isdigit() and len(raw) < LONGEST_NUMBER else 0  # another client's may be anything

    def moment(field: bytes) -> datetime | None:
        return from_epoch_ms(min(number(field), LATEST_MS)) if state.get(field) else None

    gateway = state.get(b"gateway")
    held: Any = state.get(b"held") or b""
    return Device(
        client_id=client_id,
        backlog=backlog,
        seq=number(b"seq"),
        last_packet_id=packet_id_of(number(b"seq")) if number(b"seq") else 0,
        epoch=number(b"epoch"),
        gateway=None if gateway is None else gateway.decode(errors="replace"),
        connected_at=moment(b"connected_ms"),
        seen_at=moment(b"seen_ms"),
        received=len(held.split(b",")) if held else 0,
        dropped=number(b"dropped"),
        expired=number(b"expired"),
        late=number(b"late"),
    )
