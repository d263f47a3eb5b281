"""The delayed poller: due messages move in order; neither an outage nor a broken partition stops it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any

import anyio
import pytest

from rsmq.model.keys import Keys
from rsmq.model.packing import pack_fields
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.topics import Topics
from rsmq.worker import delayed_poller
from rsmq.worker.delayed_poller import MOST_AT_ONCE, DelayedPoller
from tests.outage import LongBackoff, refused
from tests.patience import until
from tests.servers import Server

PARTITIONS = [("orders", 0), ("orders", 1)]


async def delay(client: Client, keys: Keys, partition: int, due: int, data: str) -> None:
    """Store a delayed message that is due at `due`."""
    await client.execute_command("ZADD", keys.delayed("orders", partition), due, pack_fields(["data", data]))


def poller_of(client: Client, keys: Keys, settings: Settings, partitions: Any) -> DelayedPoller:
    """A poller of these partitions."""
    return DelayedPoller(client, keys, settings, lambda: partitions, Topics(client, keys, settings))


async def moved(client: Client, keys: Keys, partition: int) -> list[bytes]:
    """The payloads that have arrived in the stream."""
    found = await client.execute_command("XRANGE", keys.stream("orders", partition), "-", "+")
    return [fields[1] for _, fields in found]


async def test_due_messages_move_in_order_of_their_time(client: Client, keys: Keys, settings: Settings) -> None:
    """Overdue messages move oldest first, messages that become due later move too, and the others stay."""
    seconds, _ = await client.execute_command("TIME")
    now = int(seconds) * 1000
    for data, due in (("2", now - 10), ("1", now - 20), ("soon", now + 1100), ("later", now + 10**9)):
        await delay(client, keys, 0, due, data)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(poller_of(client, keys, settings, PARTITIONS).run)

        async def arrived() -> bool:
            return await moved(client, keys, 0) == [b"1", b"2", b"soon"]

        await until(arrived, "it arrived")
        tasks.cancel_scope.cancel()
    assert await client.execute_command("ZCARD", keys.delayed("orders", 0)) == 1


async def test_many_due_messages_move_in_bounded_calls(client: Client, keys: Keys, settings: Settings) -> None:
    """A thousand due messages move in calls of 200 without a pause, each message once."""
    for number in range(1000):
        await delay(client, keys, 1, number, str(number))
    slow = replace(settings, delay_resolution=timedelta(hours=1))
    poller = poller_of(client, keys, slow, PARTITIONS)
    assert await poller.release(PARTITIONS) == [0, MOST_AT_ONCE]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(poller.run)
        tasks.start_soon(poller_of(client, keys, slow, PARTITIONS).run)

        async def arrived() -> bool:
            return len(await moved(client, keys, 1)) >= 1000

        await until(arrived, "it arrived")
        tasks.cancel_scope.cancel()
    assert await moved(client, keys, 1) == [b"%d" % number for number in range(1000)]


async def test_poller_polls_only_the_current_partitions(client: Client, keys: Keys, settings: Settings) -> None:
    """The partitions are read anew for each poll, because they change with the leases."""
    await delay(client, keys, 0, 1, "0")
    await delay(client, keys, 1, 1, "1")
    partitions: list[tuple[str, int]] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(poller_of(client, keys, settings, partitions).run)
        partitions.append(("orders", 1))

        async def arrived() -> bool:
            return await moved(client, keys, 1) == [b"1"]

        await until(arrived, "it arrived")
        tasks.cancel_scope.cancel()
    assert await moved(client, keys, 0) == []


async def test_broken_partition_does_not_stop_the_others(
    client: Client, keys: Keys, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """A key of the wrong type is logged once, and the other partition goes on."""
    await client.execute_command("SET", keys.delayed("orders", 0), "not a zset")
    poller = poller_of(client, keys, settings, PARTITIONS)
    for number in range(3):
        await delay(client, keys, 1, 1, str(number))
        assert await poller.release(PARTITIONS) == [0, 1]
    assert [record.levelname for record in caplog.records if "orders.0" in record.getMessage()].count("ERROR") == 1
    await poller.close()


async def test_delayed_poller_during_an_outage_waits_and_goes_on(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    """The server dies and comes back with its data: the message moves, and the log has one warning."""
    with Server(aof=True) as server:
        settings = Settings(url=server.url)
        async with Connector(server.url, settings).connected() as client, anyio.create_task_group() as tasks:
            tasks.start_soon(poller_of(client, keys, settings, PARTITIONS).run)
            await client.execute_command("SCRIPT", "FLUSH")
            await delay(client, keys, 0, 1, "before")

            async def before() -> bool:
                return await moved(client, keys, 0) == [b"before"]

            await until(before, "it waits")
            await asyncio.to_thread(server.kill)
            await until(lambda: caplog.records, "the outage is logged")
            await asyncio.to_thread(server.start)
            await delay(client, keys, 0, 1, "after")

            async def after() -> bool:
                return (await moved(client, keys, 0))[-1:] == [b"after"]

            await until(after, "it has moved")
            tasks.cancel_scope.cancel()
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


async def test_delayed_poller_survives_a_long_outage(
    keys: Keys, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, no_task_left: None
) -> None:
    """It still retries after 1 030 refused connections: a pause of 2**1024 would be too large for a float."""
    monkeypatch.setattr(delayed_poller, "LONGEST_PAUSE", 0.0)
    monkeypatch.setattr(delayed_poller, "Backoff", LongBackoff)
    caplog.set_level(logging.DEBUG, "rsmq.delay")

    def failures() -> int:
        return sum(record.getMessage().startswith("delayed messages wait:") for record in caplog.records)

    with refused() as url:
        settings = Settings(url=url, delay_resolution=timedelta(milliseconds=1))
        client = Connector(url, settings).client()
        async with anyio.create_task_group() as tasks:
            await tasks.start(poller_of(client, keys, settings, PARTITIONS[:1]).run)
            await until(lambda: failures() > 30, "30 attempts have failed")
            tasks.cancel_scope.cancel()
        await client.aclose()
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


async def test_a_poller_wakes_when_the_next_message_is_due(client: Client, keys: Keys, settings: Settings) -> None:
    """Long before its next round, and then it asks only the partition of that message."""
    slow = replace(settings, delay_resolution=timedelta(hours=1))
    first, second, poller = (poller_of(client, keys, slow, PARTITIONS) for _ in range(3))
    assert await first._poll() > 3000
    await first.close()
    seconds, micros = await client.execute_command("TIME")
    now = int(seconds) * 1000 + int(micros) // 1000
    await delay(client, keys, 0, now + 60_000, "in a minute")
    await delay(client, keys, 1, now - 1, "due")
    assert 0 < await second._poll() <= 60
    await second.close()
    assert await moved(client, keys, 1) == [b"due"]
    await client.execute_command("DEL", keys.delayed("orders", 0))
    await delay(client, keys, 0, now + 200, "soon")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(poller.run)

        async def arrived() -> bool:
            return await moved(client, keys, 0) == [b"soon"]

        await until(arrived, "it does not wait for the round of the next hour")
        tasks.cancel_scope.cancel()
