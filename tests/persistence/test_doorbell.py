"""The doorbell: sessions share one subscription connection, which survives sessions that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import anyio
import pytest

from rsmq import Broker, Session, SessionTaken, Settings
from rsmq.errors import BrokerUnavailable
from rsmq.model.keys import Keys
from rsmq.persistence.doorbell import Doorbell
from rsmq.redis.client.connector import Client, Connector
from tests.redis.answers import AnsweringProxy
from tests.servers import Server

SOON = 20.0
"""Far below the poll of these brokers: what comes in time was rung for."""


class Ear:
    """Counts rings."""

    def __init__(self) -> None:
        self.rings = 0
        self._rang = asyncio.Event()

    def __call__(self) -> None:
        self.rings += 1
        self._rang.set()

    async def hears(self, rings: int) -> None:
        """Wait until it has rung `count` times."""
        with anyio.fail_after(SOON):
            while self.rings < rings:
                self._rang.clear()
                await self._rang.wait()


@pytest.fixture
async def doorbell(client: Client) -> AsyncIterator[Doorbell]:
    """A running doorbell."""
    async with anyio.create_task_group() as tasks:
        running = Doorbell(client)
        await tasks.start(running.run)
        yield running
        tasks.cancel_scope.cancel()


async def listeners(client: Client, channel: str) -> int:
    """Connections that the server rings for a channel."""
    return int((await client.execute_command("PUBSUB", "SHARDNUMSUB", channel))[1])


async def lines(client: Client) -> set[bytes]:
    """The ids of all subscribed connections."""
    clients = await client.execute_command("CLIENT", "LIST", "TYPE", "pubsub")
    return {line.split(b" ", 1)[0] for line in clients.splitlines()}


async def listens(client: Client, channel: str, count: int = 1) -> None:
    """Wait until `count` connections are subscribed to the channel."""
    with anyio.fail_after(SOON):
        while await listeners(client, channel) != count:
            await anyio.sleep(0.001)


async def test_doorbell_rings_when_subscribed_and_for_each_letter(
    client: Client, keys: Keys, doorbell: Doorbell
) -> None:
    """The first ring covers letters stored before the server confirmed the subscription."""
    ear, channel = Ear(), keys.wake("phone")
    doorbell.listen(channel, ear)
    for rings in range(1, 4):
        await ear.hears(rings)
        await client.execute_command("SPUBLISH", channel, "")
    await ear.hears(4)


async def test_doorbell_rings_for_the_first_letters_of_new_devices_in_one_call(
    client: Client, keys: Keys, settings: Settings, doorbell: Doorbell
) -> None:
    """The server may have lost the session of each: it knows none of them."""
    ears = {f"phone-{number}": Ear() for number in range(3)}
    for device, ear in ears.items():
        doorbell.listen(keys.wake(device), ear)
        await listens(client, keys.wake(device))
        await ear.hears(1)
    async with Broker(replace(settings, preflight="warn")) as broker:
        await broker.send_many([(device, "first") for device in ears])
    for ear in ears.values():
        await ear.hears(2)


async def test_doorbell_rings_for_both_sessions_of_a_device(client: Client, keys: Keys, doorbell: Doorbell) -> None:
    """They share a subscription, which ends with the second of them."""
    one, other, channel = Ear(), Ear(), keys.wake("phone")
    doorbell.listen(channel, one)
    doorbell.listen(channel, other)
    await one.hears(1)
    doorbell.forget(channel, one)
    doorbell.forget(channel, one)  # once more is harmless
    await client.execute_command("SPUBLISH", channel, "")
    await other.hears(2)
    assert one.rings == 1
    assert await listeners(client, channel) == 1
    doorbell.forget(channel, other)
    await listens(client, channel, 0)


async def test_listener_that_comes_back_at_once_is_rung(client: Client, keys: Keys, doorbell: Doorbell) -> None:
    """A device that leaves and comes back before the server has replied does not break the connection of the others."""
    other, channel = Ear(), keys.wake("phone")
    doorbell.listen(keys.wake("other"), other)
    await other.hears(1)
    before = await lines(client)
    for _ in range(5):
        ear = Ear()
        doorbell.listen(channel, ear)
        await ear.hears(1)
        doorbell.forget(channel, ear)
        doorbell.listen(channel, ear)
        await ear.hears(2)
        doorbell.forget(channel, ear)
    await listens(client, channel, 0)
    assert before <= await lines(client)
    assert other.rings == 1


async def test_channel_taken_away_by_the_server_is_subscribed_again(
    client: Client, keys: Keys, doorbell: Doorbell
) -> None:
    """An unrequested unsubscription means that the slot moved: all channels of the connection are subscribed again."""
    ear, channel = Ear(), keys.wake("phone")
    doorbell.listen(channel, ear)
    await ear.hears(1)
    (subscription,) = doorbell._subscriptions.values()
    subscription.send(b"SUNSUBSCRIBE", channel.encode())  # what the server says is the same as when a slot moves
    await ear.hears(2)
    await client.execute_command("SPUBLISH", channel, "")
    await ear.hears(3)
    assert doorbell._subscriptions
    assert subscription not in doorbell._subscriptions.values()


async def test_cut_connection_is_opened_again_and_rings(client: Client, keys: Keys, doorbell: Doorbell) -> None:
    """The new connection subscribes to all channels, also to those added meanwhile."""
    stays, leaves, comes = Ear(), Ear(), Ear()
    doorbell.listen(keys.wake("stays"), stays)
    doorbell.listen(keys.wake("leaves"), leaves)
    await stays.hears(1)
    await leaves.hears(1)
    (subscription,) = doorbell._subscriptions.values()
    await client.execute_command("CLIENT", "KILL", "ID", subscription._connection.client_id)
    doorbell.forget(keys.wake("leaves"), leaves)
    doorbell.listen(keys.wake("comes"), comes)
    await stays.hears(2)
    await comes.hears(1)
    for name in ("stays", "leaves", "comes"):
        await client.execute_command("SPUBLISH", keys.wake(name), "")
    await stays.hears(3)
    await comes.hears(2)
    assert leaves.rings == 1
    assert await listeners(client, keys.wake("leaves")) == 0


async def test_doorbell_ignores_foreign_channels(client: Client, keys: Keys, doorbell: Doorbell) -> None:
    """A ring that arrives after its session ended is ignored."""
    ear, channel = Ear(), keys.wake("phone")
    doorbell.listen(channel, ear)
    await ear.hears(1)
    doorbell.forget(channel, ear)
    doorbell._rung(channel.encode(), b"")
    assert ear.rings == 1
    assert repr(doorbell).startswith("<Doorbell channels=0")


async def test_device_that_reconnects_at_once_gets_its_letters(
    server_url: str, prefix: str, no_task_left: None
) -> None:
    """It leaves and connects at the same time, repeatedly: each session is rung, over the same connection."""
    settings = Settings(url=server_url, prefix=prefix, preflight="warn", inbox_poll=timedelta(hours=1))
    async with Broker(settings) as broker, broker.connect("other") as other:
        waiting = asyncio.ensure_future(anext(other))
        await listens(broker.client, broker.keys.wake("other"))
        before = await lines(broker.client)
        session = await broker.connect("phone", auto_ack=True).__aenter__()
        for n in range(10):
            _, session = await asyncio.gather(leave(session), broker.connect("phone", auto_ack=True).__aenter__())
            await broker.send("phone", n)
            with anyio.fail_after(SOON):
                while (await anext(session)).payload != n:
                    pass  # the session before could not acknowledge this one any more
        await leave(session)
        await listens(broker.client, broker.keys.wake("phone"), 0)
        assert before <= await lines(broker.client)
        await broker.send("other", "still there")
        with anyio.fail_after(SOON):
            assert (await waiting).payload == "still there"


async def leave(session: Session) -> None:
    """Close the session, unless the next one has taken over already."""
    with suppress(SessionTaken):
        await session.__aexit__(None, None, None)


async def test_doorbell_follows_a_name_that_leads_to_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demoted master keeps connections that only listen: they follow the answers of the others."""
    monkeypatch.setattr("rsmq.persistence.doorbell.PING_EVERY", 0.01)
    with Server(tcp=True) as old, Server(tcp=True) as new:
        async with (
            AnsweringProxy(old.port) as proxy,
            Connector(proxy.url, Settings(url=proxy.url)).client() as client,
            anyio.create_task_group() as tasks,
        ):
            doorbell, ear = Doorbell(client), Ear()
            await tasks.start(doorbell.run)
            doorbell.listen("wake", ear)
            await ear.hears(1)
            await client.execute_command("SET", "a", "1")
            proxy.answer = "READONLY"
            proxy.move(new.port)
            with pytest.raises(BrokerUnavailable):
                await client.execute_command("SET", "a", "1")
            await ear.hears(2)
            await client.execute_command("SPUBLISH", "wake", "")
            await ear.hears(3)
            tasks.cancel_scope.cancel()
