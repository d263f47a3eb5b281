"""Inboxes driven by their scripts, one call at a time, beside the published design on the same server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis.asyncio

from benchmarks.published import Published
from rsmq import Broker, Settings
from rsmq.model.keys import Keys
from rsmq.persistence.letter import Letter, pack_letter, pack_letters, seal
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import (
    ACK_LETTERS,
    ADD_LETTERS,
    CLEAR_INBOX,
    CLOSE_SESSION,
    OPEN_SESSION,
    PAGE_LETTERS,
    RECEIVE_LETTERS,
)
from tests.patience import until
from tests.servers import Server

WEEK_MS = 7 * 86_400_000


class Inbox:
    """One device's scripts, with the arguments that a test seldom cares about filled in."""

    def __init__(self, client: Client, keys: Keys, device: str = "phone", limit: int = 10_000) -> None:
        self.client, self.keys, self.device, self.limit = client, keys, device, limit
        self.inbox, self.session, self.expiry, self.wake = keys.device(device)
        self._position = self._connects = 0

    async def add(
        self,
        *payloads: object,
        source: str = "s",
        first: int | None = None,
        ttl: str | int = "",
        published: str | int = "",
    ) -> list[int]:
        """Store; returns stored, dropped, expired, late. `first` is the position of the first one."""
        start = self._position + 1 if first is None else first
        self._position = max(self._position, start + len(payloads) - 1)
        letters = list[bytes]()
        for position, payload in enumerate(payloads, start):
            envelope = payload if isinstance(payload, bytes) else str(payload).encode()
            letters.append(pack_letter(f"{position:016d}", published, ttl, seal(envelope, "text/plain")))
        args = (WEEK_MS, self.limit, 600_000, pack_letters([(f"source:{source}", letters)]))
        reply = await ADD_LETTERS(self.client, self.keys.device(self.device)[:3], args)
        assert reply[0] == b"OK"
        return list(reply[1:])

    async def open(
        self, *, clean: bool = False, position: int | None = None, gateway: str = "g"
    ) -> tuple[str, list[Any]]:
        """Connect; returns the epoch, empty if it is refused, and all of the reply."""
        keys = (self.inbox, self.session, self.expiry, self.wake)
        self._connects += position is None
        source = (f"source:!{gateway}", f"{self._connects if position is None else position:016d}", 600_000)
        reply = await OPEN_SESSION(self.client, keys, ("gateway", int(clean), WEEK_MS, *source))
        return reply[1].decode() if reply[0] == b"OK" else "", reply

    async def page(self, epoch: str, after: int = 0, count: int = 100, size: int = 1 << 20) -> list[Any]:
        """The raw reply."""
        keys = (self.inbox, self.session, self.expiry)
        return list(await PAGE_LETTERS(self.client, keys, (epoch, after, count, size, WEEK_MS)))

    async def letters(self, epoch: str, after: int = 0, count: int = 100, size: int = 1 << 20) -> list[Letter]:
        """The letters of one page."""
        reply = await self.page(epoch, after, count, size)
        assert reply[0] == b"OK", reply
        return [Letter(int(ref), envelope) for ref, envelope in zip(reply[3::2], reply[4::2], strict=True)]

    async def texts(self, epoch: str, after: int = 0, count: int = 100) -> list[str]:
        """Their payloads."""
        return [letter.payload for letter in await self.letters(epoch, after, count)]

    async def ack(self, epoch: str, *seqs: int) -> list[Any]:
        """The raw reply, as if they had been sent."""
        await self.have_sent(max(seqs))
        return list(await ACK_LETTERS(self.client, (self.inbox, self.session, self.expiry), (epoch, *seqs)))

    async def receive(self, epoch: str, *seqs: int) -> list[Any]:
        """The raw reply, as if they had been sent."""
        await self.have_sent(max(seqs))
        return list(await RECEIVE_LETTERS(self.client, (self.inbox, self.session, self.expiry), (epoch, *seqs)))

    async def have_sent(self, seq: int) -> None:
        """As if a page had reached this seq."""
        if await self.client.execute_command("EXISTS", self.session):
            sent = int((await self.state()).get("sent", 0))
            await self.client.execute_command("HSET", self.session, "sent", max(sent, seq))

    async def close(self, epoch: str) -> bytes:
        """The raw reply."""
        return bytes(await CLOSE_SESSION(self.client, (self.session,), (epoch,)))

    async def clear(self, *, floor: int = 0, count: int = 1000) -> list[Any]:
        """The raw reply."""
        keys = (self.inbox, self.session, self.expiry)
        return list(await CLEAR_INBOX(self.client, keys, (floor, count)))

    async def state(self) -> dict[str, str]:
        """The session hash."""
        flat = await self.client.execute_command("HGETALL", self.session)
        return {name.decode(): value.decode() for name, value in zip(flat[::2], flat[1::2], strict=True)}

    async def refs(self) -> list[int]:
        """What is stored, by seq."""
        return [int(ref) for ref in await self.client.execute_command("ZRANGE", self.inbox, 0, -1)]

    async def start_at(self, seq: int) -> None:
        """As if so many letters had come before."""
        await self.client.execute_command("HSET", self.session, "seq", seq)

    async def now_ms(self) -> int:
        """The server's clock."""
        seconds, micros = await self.client.execute_command("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def expired(self, *seqs: int) -> None:
        """Wait until these letters have expired."""

        async def is_gone() -> bool:
            return not await self.client.execute_command("EXISTS", *(self.keys.letter(self.device, n) for n in seqs))

        await until(is_gone, f"letters {seqs} have expired")

    async def ttls(self) -> dict[str, int]:
        """Every key of the device with its time to live in ms (-1: none)."""
        found = await self.client.execute_command("KEYS", f"{self.keys.prefix}:*")
        return {name.decode(): await self.client.execute_command("PTTL", name) for name in found}


@pytest.fixture
def make_broker(server_url: str, prefix: str) -> Callable[..., Broker]:
    """A broker whose sessions practically never poll."""

    def make(**overrides: object) -> Broker:
        values = {"url": server_url, "prefix": prefix, "preflight": "warn", "inbox_poll": timedelta(hours=1)}
        return Broker(Settings(**{**values, **overrides}))

    return make


@pytest.fixture
async def broker(make_broker: Callable[..., Broker], no_task_left: None) -> AsyncIterator[Broker]:
    """A connected broker."""
    async with make_broker() as connected:
        yield connected


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that this test may pause and kill."""
    with Server() as server:
        yield server


@pytest.fixture
def inbox(client: Client, keys: Keys) -> Inbox:
    """The inbox of `phone`."""
    return Inbox(client, keys)


@pytest.fixture
async def published(server_url: str, prefix: str) -> AsyncIterator[Published]:
    """The published design under this test's prefix."""
    async with redis.asyncio.Redis.from_url(server_url) as plain:
        yield Published(plain, prefix=f"{prefix}-published:")
