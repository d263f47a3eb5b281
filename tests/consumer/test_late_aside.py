"""A call that puts messages aside, still on its way when its partition is given back: it must do nothing any more."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from rsmq import Broker, Settings
from rsmq.redis.scripts import PUT_ASIDE
from rsmq.testing.proxy import Proxy
from tests.contract.witness import ask, dead, lanes
from tests.patience import until
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("no_task_left")

PREFETCH = 40


@pytest.mark.parametrize("meanwhile", ["handover", "recovery"])
async def test_deleted_message_has_one_dead_letter(meanwhile: str) -> None:
    """What happens meanwhile may find it deleted; the late call finds it deleted, too."""
    patient: Any = {"preflight": "warn", "partitions": 1, "lease_ttl": "PT60S", "presence_grace": "PT0S"}
    may_end = anyio.Event()
    with Server(tcp=True) as server:
        async with Proxy(server.port) as proxy:
            worker = Broker(Settings(url=proxy.url, prefetch=PREFETCH, **patient))
            observer = Broker(Settings(url=server.url, **patient))

            @worker.handler("t", group="g", concurrency=4)
            async def handle(_order: dict[str, int]) -> None:
                await may_end.wait()

            async with observer, worker.running():
                await until(lambda: lanes(worker), "it has its partition")
                assert worker.worker is not None
                (consumer,) = worker.worker.consumers
                (lane,) = consumer.lanes.values()
                proxy.hold(lambda data: PUT_ASIDE.sha.encode() in data)
                await observer.publish_many("t", [{"n": n} for n in range(2 * PREFETCH)], key=lambda _: "hot")
                await until(lambda: len(lane.in_flight) + lane.flows.far == 2 * PREFETCH, "all are read")
                await until(lambda: proxy.is_holding, "the call is on its way")
                await ask(observer, "XDEL", lane.stream, list(lane.flows.far_ids())[-1])
                if meanwhile == "handover":
                    handover = asyncio.create_task(consumer.lifecycle.quiesce(lane, 10))
                    await until(lambda: consumer.stats["handed_back"], "what has not started is handed back")
                else:
                    number = lane.recovery.number
                    await ask(observer, "CLIENT", "KILL", "ID", consumer.fetchers.reader(0).split()[0])
                    await until(lambda: lane.recovery.number > number and lane.is_readable, "it has recovered")
                proxy.release()
                while await asyncio.wait_for(consumer.settler.check(), 20) or lane.flows.aside:
                    await asyncio.sleep(0.01)
                assert len(await dead(observer, "t", "g")) == 1
                may_end.set()
                if meanwhile == "handover":
                    await handover
