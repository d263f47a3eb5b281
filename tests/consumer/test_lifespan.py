"""Begin and end of a worker: a stop before it has joined its groups, and the consumers it leaves behind."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rsmq import Broker, Settings
from rsmq.heartbeat.heartbeat import Heartbeat
from rsmq.redis.streams import consumers_of
from rsmq.testing import ThrowawayServer
from tests.patience import until


async def test_stop_ends_a_worker_whose_server_died_while_it_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server dies between the first command and joining the group: one stop is enough."""
    joining, join = anyio.Event(), Heartbeat.join
    with ThrowawayServer(tcp=True) as server:

        async def join_dead_server(heartbeat: Heartbeat, *about: Any) -> None:
            server.kill()
            joining.set()
            await join(heartbeat, *about)

        monkeypatch.setattr(Heartbeat, "join", join_dead_server)
        broker = Broker(Settings(url=server.url, preflight="warn"))
        broker.handler("t", group="g")(handle)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(broker.run)
                await joining.wait()
                await anyio.lowlevel.checkpoint()
                broker.stop()


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_stop_removes_the_consumers_of_an_idle_group(server_url: str, prefix: str, distribution: Any) -> None:
    """With nothing pending a group has no consumer once its last worker has stopped."""
    broker, handled = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=2)), list[int]()
    ordering = "key" if distribution == "hash" else "none"

    @broker.handler("t", group="g", distribution=distribution, ordering=ordering)
    async def note(order: dict[str, int]) -> None:
        handled.append(order["n"])

    async def consumers() -> int:
        return sum([len(await consumers_of(broker.client, broker.keys.stream("t", each), "g")) for each in range(2)])

    async with broker:
        async with broker.running():
            await broker.publish_many("t", [{"n": n} for n in range(20)], key=lambda order: str(order["n"]))
            await until(lambda: len(handled) == 20, "all are handled")
            assert await consumers() == 2
        assert await consumers() == 0


async def handle(_order: dict[str, int]) -> None:
    """Never called."""
