"""Large rows of an outbox: the relay puts their bodies into the store, and their entries name them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from rsmq import Broker
from rsmq.codecs import Encrypt, Keyring, Offload, Zstd
from rsmq.control import Bodies
from rsmq.model import body as body_module
from rsmq.sql import Outbox, create_tables
from tests.codecs.stores import MemoryStore
from tests.contract.witness import ask
from tests.patience import until
from tests.sql.test_outbox import is_empty

CODECS = [Zstd(), Encrypt(Keyring({"k1": b"1" * 32}))]


class Albums:
    """A broker with a store and an outbox, whose handler notes the numbers of `albums` and `cards`."""

    def __init__(self, broker: Broker, path: Path) -> None:
        self.store, self.seen = MemoryStore(), list[int]()
        self.engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
        self.outbox = Outbox(self.engine)
        self.offload = Offload(self.store, above="10kB")
        self.broker = Broker(broker.settings, codecs=CODECS, offload=self.offload)
        self.broker.include(self.outbox)
        for topic in ("albums", "cards"):
            self.broker.handler(topic, group="printer", name=topic, partitions=1)(self._take)

    async def _take(self, album: dict[str, Any]) -> None:
        self.seen.append(album["n"])

    async def publish(self, topic: str, n: int, size: int = 40_000, **options: Any) -> None:
        """In a transaction of its own; all have one key."""
        async with self.engine.begin() as connection:
            payload = {"n": n, "x": os.urandom(size // 2).hex()}
            await self.outbox.publish(connection, topic, payload, **{"key": "ada", **options})

    async def see(self, *numbers: int) -> None:
        """Until these were handled, in this order, and no row waits."""
        await until(lambda: len(self.seen) >= len(numbers), f"{numbers} are handled")
        assert self.seen == list(numbers)
        await until(lambda: is_empty(self.outbox), "nothing waits")


@pytest.fixture
async def albums(broker: Broker, tmp_path: Path) -> AsyncIterator[Albums]:
    """With its tables."""
    made = Albums(broker, tmp_path / "outbox.db")
    async with made.engine.begin() as connection:
        await connection.run_sync(create_tables)
    yield made
    await made.engine.dispose()


async def test_large_rows_lie_in_the_store_and_small_ones_in_their_entries(albums: Albums) -> None:
    """Plain rows, one with a given id, one with a unique name; a sweep finds that all bodies are needed."""
    await albums.publish("albums", 1)
    await albums.publish("albums", 2, size=10)
    await albums.publish("albums", 3, message_id="m3", expires="1h")
    await albums.publish("albums", 4, unique="album-4", expires="1h")
    async with albums.broker.running():
        await albums.see(1, 2, 3, 4)
        broker = albums.broker
        entries = await ask(broker, "XRANGE", broker.keys.stream("albums", 0), "-", "+")
        assert [b"ref" in fields for _, fields in entries] == [True, False, True, True]
        assert all(sum(map(len, fields)) < 1000 for _, fields in entries)
        (state,) = await Bodies(broker.client, broker.keys, broker.topics, albums.offload).status()
        assert (state.bodies, state.named, state.lost) == (3, 3, [])


async def test_rows_wait_in_order_while_the_store_is_away(albums: Albums) -> None:
    """Those of its topic, also the small ones; other topics go on."""
    albums.store.is_away = True
    await albums.publish("albums", 1, size=10)
    await albums.publish("albums", 2)
    await albums.publish("albums", 3, size=10)
    await albums.publish("albums", 4, unique="album-4")
    await albums.publish("cards", 5, size=10)
    async with albums.broker.running():
        await until(lambda: albums.seen == [5], "the other topic goes on")
        await asyncio.sleep(0.05)
        assert (albums.seen, (await albums.outbox.status()).backlog) == ([5], 4)
        albums.store.is_away = False
        await albums.see(5, 1, 2, 3, 4)


async def test_row_that_waits_for_room_has_one_body(albums: Albums, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay tries a full topic again and again: the body of its row is put once."""
    monkeypatch.setattr("rsmq.sql.relay.FULL_SECONDS", 0.02)
    broker = albums.broker
    async with broker:
        topic = await broker.topics.ensure("albums", 1)
        await broker.topics.change(topic.name, max_length=1)
        await broker.client.execute_command(
            "XGROUP", "CREATE", broker.keys.stream("albums", 0), "late", "0", "MKSTREAM"
        )
        await broker.publish("albums", {"n": 0}, key="ada")
    await albums.publish("albums", 1)
    async with broker.running():
        await until(lambda: albums.seen == [0], "the first is handled")
        await until(lambda: len(albums.store.names) == 1, "the body is put")
        await asyncio.sleep(0.2)
        assert len(albums.store.names) == 1
        await broker.topics.change("albums", max_length=0)
        await albums.see(0, 1)
    assert len(albums.store.names) == 1


async def test_body_that_was_swept_before_its_row_was_stored_is_put_again(
    albums: Albums, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker stood still between both for longer than a body is kept."""
    monkeypatch.setattr(body_module, "FRESH_SECONDS", -1.0)
    put, puts = albums.store.put, list[str]()

    def swept(name: str, data: bytes) -> None:
        put(name, data)
        puts.append(name)
        if "/albums/" in name and puts.count(name) == 1:
            albums.store.delete(name)

    monkeypatch.setattr(albums.store, "put", swept)
    await albums.publish("albums", 1)
    async with albums.broker.running():
        await until(lambda: is_empty(albums.outbox), "nothing waits")
        (name,) = albums.store.names
        assert puts.count(name) == 2
