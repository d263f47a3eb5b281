"""The ends of a worker's life: told to stop before it has really begun, and what it leaves behind."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rsmq import Broker, Settings
from rsmq.heartbeat.beat import Beat
from rsmq.stream import consumers_of
from rsmq.testing import ThrowawayServer
from tests.patience import until


async def test_a_stop_while_the_server_goes_away_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server dies between its first question and its joining the group: one stop ends it, nobody waits for ever."""
    joining, join = anyio.Event(), Beat.join
    with ThrowawayServer(tcp=True) as server:

        async def join_nobody(beat: Beat, *about: Any) -> None:
            server.kill()
            joining.set()
            await join(beat, *about)

        monkeypatch.setattr(Beat, "join", join_nobody)
        broker = Broker(Settings(url=server.url, preflight="warn"))
        broker.handler("t", group="g")(handle)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(broker.run)
                await joining.wait()
                await anyio.lowlevel.checkpoint()
                broker.stop()


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_a_stop_takes_the_consumers_along(server_url: str, prefix: str, distribution: Any) -> None:
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
