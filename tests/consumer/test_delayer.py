"""The delayer: due messages move in order, an outage or a broken partition does not stop it."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import anyio
import pytest

from rsmq.connect import Client, Connector
from rsmq.consumer.delayer import MOST_AT_ONCE, Delayer
from rsmq.keys import Keys
from rsmq.message import pack_fields
from rsmq.settings import Settings
from tests.patience import until
from tests.servers import Server

PLACES = [("orders", 0), ("orders", 1)]


async def delay(client: Client, keys: Keys, partition: int, due: int, data: str) -> None:
    """Keep a message until `due`."""
    await client.execute_command("ZADD", keys.delayed("orders", partition), due, pack_fields(["data", data]))


async def moved(client: Client, keys: Keys, partition: int) -> list[bytes]:
    """What has arrived in the stream."""
    found = await client.execute_command("XRANGE", keys.stream("orders", partition), "-", "+")
    return [fields[1] for _, fields in found]


async def test_due_messages_move_in_order(client: Client, keys: Keys, settings: Settings) -> None:
    """What is overdue moves first come first, what falls due while it runs moves too, and later ones stay."""
    seconds, _ = await client.execute_command("TIME")
    now = int(seconds) * 1000
    for data, due in (("2", now - 10), ("1", now - 20), ("soon", now + 1100), ("later", now + 10**9)):
        await delay(client, keys, 0, due, data)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Delayer(client, keys, settings, lambda: PLACES).run)

        async def arrived() -> bool:
            return await moved(client, keys, 0) == [b"1", b"2", b"soon"]

        await until(arrived, "it arrived")
        tasks.cancel_scope.cancel()
    assert await client.execute_command("ZCARD", keys.delayed("orders", 0)) == 1


async def test_one_call_is_bounded_and_the_rest_follows(client: Client, keys: Keys, settings: Settings) -> None:
    """A thousand due at once come in bites, without a pause between them, once each."""
    for number in range(1000):
        await delay(client, keys, 1, number, str(number))
    slow = settings.model_copy(update={"delay_resolution": timedelta(hours=1)})
    delayer = Delayer(client, keys, slow, lambda: PLACES)
    assert await delayer.release(PLACES) == [0, MOST_AT_ONCE]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(delayer.run)
        tasks.start_soon(Delayer(client, keys, slow, lambda: PLACES).run)

        async def arrived() -> bool:
            return len(await moved(client, keys, 1)) >= 1000

        await until(arrived, "it arrived")
        tasks.cancel_scope.cancel()
    assert await moved(client, keys, 1) == [b"%d" % number for number in range(1000)]


async def test_it_looks_where_it_is_told_to(client: Client, keys: Keys, settings: Settings) -> None:
    """Partitions come and go with their leases."""
    await delay(client, keys, 0, 1, "0")
    await delay(client, keys, 1, 1, "1")
    places: list[tuple[str, int]] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Delayer(client, keys, settings, lambda: places).run)
        places.append(("orders", 1))

        async def arrived() -> bool:
            return await moved(client, keys, 1) == [b"1"]

        await until(arrived, "it arrived")
        tasks.cancel_scope.cancel()
    assert await moved(client, keys, 0) == []


async def test_a_broken_partition_does_not_stop_the_others(
    client: Client, keys: Keys, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """A foreign key type is logged once, and the other partition goes on."""
    await client.execute_command("SET", keys.delayed("orders", 0), "not a zset")
    delayer = Delayer(client, keys, settings, lambda: PLACES)
    for number in range(3):
        await delay(client, keys, 1, 1, str(number))
        assert await delayer.release(PLACES) == [0, 1]
    assert [record.levelname for record in caplog.records if "orders.0" in record.message].count("ERROR") == 1
    await delayer.close()


async def test_an_outage_is_waited_out(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    """The server dies and comes back with its data: the message moves, and the log has one line about it."""
    with Server(aof=True) as server:
        settings = Settings(url=server.url)
        async with Connector(server.url, settings).connected() as client, anyio.create_task_group() as tasks:
            tasks.start_soon(Delayer(client, keys, settings, lambda: PLACES).run)
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
