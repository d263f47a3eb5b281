"""The worker's start and end."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from rsmq import Broker, Settings


async def test_worker_that_is_stopped_while_it_starts_ends(server_url: str, prefix: str) -> None:
    """A stop that comes before there is a consumer to stop is carried out as soon as there is one."""
    broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn"))

    @broker.handler("orders", group="billing")
    async def bill(order: dict[str, int]) -> None: ...

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(broker.run)
            while (worker := broker.worker) is None:
                await anyio.lowlevel.checkpoint()
            assert not worker.consumers
            broker.stop()
