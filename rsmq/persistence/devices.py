"""Devices for operators: their backlogs, connections and dropped letters. Needs no session."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rsmq.errors import ConfigError
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.keys import Keys, decode_device
from rsmq.model.record import exact_text, moment, whole
from rsmq.persistence.letter import Letter, packet_id_of
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import CLEAR_INBOX
from rsmq.redis.streams import ask_all

CHUNK: Final = 1000
SCAN_COUNT: Final = 1000
MOST_PEEKED: Final = 1000


@dataclass(frozen=True, slots=True)
class Device:
    """The state of a device. `backlog` counts the stored letters, expired ones included until a script removes them.

    `gateway` and `connected_at` are None while it is not connected; they stay set after a gateway died.
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
    """Lists devices, reads their inboxes without changing them, and purges one."""

    def __init__(self, client: Client, keys: Keys, encoding: Encoding = NO_CODECS) -> None:
        """`encoding` undoes the letters that `peek` returns."""
        self._client, self._keys = client, keys
        self._encoding = encoding

    async def find(self, client_id: str) -> Device | None:
        """The state of a device; None if the server does not know it."""
        inbox, session, *_ = self._keys.device(client_id)
        flat = await self._client.execute_command("HGETALL", session)
        if not flat:
            return None
        return read_device(client_id, flat, await self._client.execute_command("ZCARD", inbox))

    async def names(self) -> AsyncIterator[str]:
        """The ids of all known devices, unordered; one that comes or goes meanwhile may be missing or repeated."""
        async for page in self._pages():
            for name in page:
                yield name

    async def iterate(self) -> AsyncIterator[Device]:
        """The state of every known device."""
        async for page in self._pages():
            commands: list[tuple[str, str]] = []
            for name in page:
                commands += (("HGETALL", self._keys.session(name)), ("ZCARD", self._keys.inbox(name)))
            replies = await ask_all(self._client, commands)
            for name, flat, backlog in zip(page, replies[::2], replies[1::2], strict=True):
                if flat:
                    yield read_device(name, flat, backlog)

    async def _pages(self) -> AsyncIterator[list[str]]:
        """Pages of device ids, from a scan of each node."""
        front, back = f"{self._keys.prefix}:{{", "}_session"
        options = ("MATCH", f"{front}*{back}", "COUNT", SCAN_COUNT, "TYPE", "hash")
        await self._client.refresh()
        for node in self._client.nodes:
            cursor = b"0"
            while True:
                cursor, found = await node.execute_command("SCAN", cursor, *options)
                if found:
                    names = filter(None, map(exact_text, found))  # another client may write keys without a text
                    yield [decode_device(name[len(front) : -len(back)]) for name in names]
                if cursor == b"0":
                    break

    async def peek(self, client_id: str, after: int = 0, count: int = 10) -> list[Letter]:
        """Letters after a seq, in order, without a session. Changes nothing. `count` is 1 to 1000."""
        if not 1 <= count <= MOST_PEEKED:
            raise ConfigError(f"count={count} is not possible: use 1 to {MOST_PEEKED} letters")
        inbox = self._keys.inbox(client_id)
        refs = await self._client.execute_command("ZRANGEBYSCORE", inbox, f"({after}", "+inf", "LIMIT", 0, count)
        if not refs:
            return []
        seqs = [seq for ref in refs if (seq := whole(ref)) is not None]  # another client may write anything
        envelopes = await self._client.execute_command("MGET", *(f"{inbox}_{seq}" for seq in seqs)) if seqs else ()
        return [
            Letter(seq, envelope, encoding=self._encoding)
            for seq, envelope in zip(seqs, envelopes, strict=True)
            if envelope is not None
        ]

    async def purge(self, client_id: str) -> int:
        """Remove the letters stored now, in bounded steps; returns how many.

        A connected session continues with later letters.
        """
        inbox, session, expiry, _ = self._keys.device(client_id)
        newest = whole(await self._client.execute_command("HGET", session, "seq")) or 0
        removed, left = 0, 1
        while left:
            _, number, left = await CLEAR_INBOX(self._client, (inbox, session, expiry), (newest, CHUNK))
            removed += number
        return int(removed)


def read_device(client_id: str, flat: list[bytes], backlog: int) -> Device:
    """The session hash, field and value in turn, as a device."""
    state = dict(zip(flat[::2], flat[1::2], strict=True))

    def number(field: bytes) -> int:
        return whole(state.get(field)) or 0

    gateway, held = state.get(b"gateway"), state.get(b"held")
    return Device(
        client_id=client_id,
        backlog=backlog,
        seq=number(b"seq"),
        last_packet_id=packet_id_of(number(b"seq")) if number(b"seq") else 0,
        epoch=number(b"epoch"),
        gateway=None if gateway is None else gateway.decode(errors="replace"),
        connected_at=moment(state.get(b"connected_ms")),
        seen_at=moment(state.get(b"seen_ms")),
        received=len(held.split(b",")) if held else 0,
        dropped=number(b"dropped"),
        expired=number(b"expired"),
        late=number(b"late"),
    )
