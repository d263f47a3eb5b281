"""A read that is still on its way when its partition changes hands: it must not take messages out of the backlog."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from rsmq import Broker, Settings
from rsmq.consumer.reading.fetcher import Fetcher
from rsmq.testing.proxy import Proxy
from tests.contract.witness import ask, lanes, settled
from tests.patience import until
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("no_task_left")

BACKLOG = 400
KEYS = 8


class Scene:
    """A member behind a proxy, whose next read can be held back, and one with a direct connection."""

    def __init__(self, server: Server, proxy: Proxy, partitions: int, **options: Any) -> None:
        # leases do not end by themselves during the test, and a read ends soon
        patient: Any = {"preflight": "warn", "partitions": partitions, "lease_ttl": "PT20S", "presence_grace": "PT0S"}
        quick: Any = {"block": "PT0.2S", "prefetch": 20, "stop_grace": "PT5S"}
        self.proxy = proxy
        self.first, self.second = (Broker(Settings(url=url, **patient, **quick)) for url in (proxy.url, server.url))
        self.handled = dict[str, list[int]]()
        self.may_handle = anyio.Event()
        for broker in (self.first, self.second):
            broker.handler("t", group="g", **options)(self.handle)

    async def handle(self, order: dict[str, Any]) -> None:
        await self.may_handle.wait()
        self.handled.setdefault(order["key"], []).append(order["n"])

    async def hold_a_read(self) -> int:
        """Keep back the next read of the first member; returns the id of its connection."""
        (reading,) = self.fetchers()
        self.proxy.hold(lambda data: b"XREADGROUP" in data)
        await until(lambda: self.proxy.is_holding, "a read is on its way")
        return reading._connection.client_id

    def hold_back_reconnects(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first member opens no other connection to read on before the backlog is handled."""
        (reading,), connect = self.fetchers(), Fetcher._connect

        async def later() -> None:
            if not reading._connection.is_open:
                await self.may_handle.wait()
            await connect(reading)

        monkeypatch.setattr(reading, "_connect", later)

    def fetchers(self) -> tuple[Fetcher, ...]:
        assert self.first.worker is not None
        return self.first.worker.consumers[0].fetchers.active

    async def publish(self) -> None:
        """More messages of each key than the second member reads at once."""
        items = [{"key": f"k{n % KEYS}", "n": n} for n in range(BACKLOG)]
        await self.second.publish_many("t", items, key=lambda item: str(item["key"]))

    async def release(self, connection: int) -> None:
        """Let the held read arrive; returns when the server is done with its connection."""
        self.proxy.release()

        async def is_gone() -> bool:
            clients = await self.second.client.execute_command("CLIENT", "LIST", "ID", connection)
            return not clients.strip()

        await until(is_gone, "the late read has ended")

    async def is_reading(self) -> bool:
        """Whether the second member has a part of the backlog."""
        streams = [self.second.keys.stream("t", number) for number in lanes(self.second)]
        return all([(await ask(self.second, "XPENDING", stream, "g"))[0] for stream in streams])

    async def ends_in_order(self, connection: int) -> None:
        """The held read arrives in the middle of the second member's backlog, which is handled in order of its keys."""
        await self.publish()
        await until(self.is_reading, "the second member reads")
        await self.release(connection)
        self.may_handle.set()
        await settled(self.second, "t")
        if self.second.handlers[0].ordering == "none":
            self.handled = {key: sorted(numbers) for key, numbers in self.handled.items()}
        assert self.handled == {f"k{key}": list(range(key, BACKLOG, KEYS)) for key in range(KEYS)}


@asynccontextmanager
async def make_scene(partitions: int = 1, **options: Any) -> AsyncIterator[Scene]:
    with Server(tcp=True) as server:
        async with Proxy(server.port) as proxy:
            yield Scene(server, proxy, partitions, **options)


async def test_read_that_is_late_when_its_member_stops_takes_nothing() -> None:
    """The lease is given back while the read is on its way: the next owner cuts it off."""
    async with make_scene() as scene, scene.second:
        async with scene.first.running():
            connection = await scene.hold_a_read()
        async with scene.second.running():
            await scene.ends_in_order(connection)


async def test_read_that_is_late_when_its_member_of_a_shared_group_stops_takes_nothing() -> None:
    """What it took would wait for a whole lease: the member ends its connection before it leaves."""
    async with make_scene(distribution="shared", ordering="none") as scene, scene.second:
        async with scene.first.running():
            connection = await scene.hold_a_read()
        async with scene.second.running():
            await scene.ends_in_order(connection)


async def test_read_that_is_late_when_its_member_is_cancelled_takes_nothing() -> None:
    """The same for a member that is cancelled instead of stopped."""
    async with make_scene() as scene, scene.second:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scene.first.run)
            await until(lambda: scene.first.worker and scene.first.worker.is_serving and lanes(scene.first), "it owns")
            connection = await scene.hold_a_read()
            tasks.cancel_scope.cancel()
        async with scene.second.running():
            await scene.ends_in_order(connection)


@pytest.mark.parametrize("is_connecting", [False, True])
async def test_read_that_is_late_at_a_handover_takes_nothing(
    monkeypatch: pytest.MonkeyPatch, is_connecting: bool
) -> None:
    """The member gives up its connection, before or in the handover, and gives back a lease without another one."""
    async with make_scene(partitions=2) as scene, scene.first.running():
        await until(lambda: len(lanes(scene.first)) == 2, "the first has all")
        connection = await scene.hold_a_read()
        scene.hold_back_reconnects(monkeypatch)
        if is_connecting:
            (reading,) = scene.fetchers()
            await until(lambda: not reading._connection.is_open, "it has given up its connection")
        async with scene.second.running():
            await until(lambda: lanes(scene.second), "one partition is handed over")
            await scene.ends_in_order(connection)
