"""The probes of a worker that cannot make progress, and of one that only takes its time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import anyio
import anyio.to_thread
import pytest

from rsmq import Broker, Reject, Settings
from rsmq.telemetry import Endpoint
from tests.patience import until

Ask = Callable[[str], Any]


def fetch(url: str) -> tuple[int, list[str]]:
    """The status of a probe and its reasons."""
    try:
        with urlopen(url, timeout=10) as answer:
            return answer.status, json.load(answer)["troubles"]
    except HTTPError as error:
        return error.code, json.load(error)["troubles"]


async def ask(endpoint: Endpoint, path: str) -> tuple[int, list[str]]:
    """Ask in a thread, as a probe would from outside."""
    return await anyio.to_thread.run_sync(fetch, f"http://{endpoint.address}{path}")


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """A broker whose stalls count after a second."""
    return Broker(replace(settings, stall_limit=timedelta(seconds=1)))


async def test_live_probe_fails_when_the_worker_has_ended_with_an_error(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """The process lives on, and its heartbeat is no longer asked."""

    @broker.handler("t", group="g")
    async def handle(order: dict[str, int]) -> None:
        """Handle nothing."""

    @broker.lifespan
    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise LookupError("no database")
        yield

    endpoint = Endpoint(broker, "127.0.0.1:0")
    async with endpoint.serving():
        assert (await ask(endpoint, "/livez"))[0] == 200
        task = asyncio.create_task(broker.run())
        await until(task.done, "the worker has ended")
        assert await ask(endpoint, "/livez") == (503, ["the worker has ended: LookupError: no database"])
        assert isinstance(task.exception(), LookupError)
    assert "/livez fails: the worker has ended: LookupError: no database" in caplog.text


async def test_live_probe_fails_when_no_free_task_takes_a_message(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases are renewed and reads go on, but nothing is handled."""
    handled: list[int] = []

    @broker.handler("t", group="g")
    async def handle(order: dict[str, int]) -> None:
        handled.append(order["n"])

    endpoint = Endpoint(broker, "127.0.0.1:0")
    async with endpoint.serving(), broker.running():
        assert broker.worker is not None
        pool = broker.worker.consumers[0].pool
        assert (await ask(endpoint, "/livez"))[0] == 200
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_wake", lambda count: 0)  # a defect of the pool
            await broker.publish("t", {"n": 1})

            async def is_failing() -> bool:
                status, troubles = await ask(endpoint, "/livez")
                return status == 503 and "and no free task takes it" in troubles[0]

            await until(is_failing, "the probe fails")
            assert (await ask(endpoint, "/readyz"))[0] == 503
        pool.wake_soon()
        await until(lambda: handled, "it is handled")

        async def is_well() -> bool:
            return (await ask(endpoint, "/livez"))[0] == 200

        await until(is_well, "the probe passes again")


async def test_live_probe_fails_when_tasks_of_the_pool_have_ended(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer tasks handle messages than the handler asks for, or none at all."""
    handled: list[int] = []

    @broker.handler("t", group="g", concurrency=1)
    async def handle(order: dict[str, int]) -> None:
        handled.append(order["n"])
        if order["n"] == 2:
            raise Reject("no")

    endpoint = Endpoint(broker, "127.0.0.1:0")
    async with endpoint.serving(), broker.running():
        assert broker.worker is not None
        pool = broker.worker.consumers[0].pool
        await broker.publish("t", {"n": 1})
        await until(lambda: handled == [1], "the pool has a task")
        (task_slot,) = pool.task_slots
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_start", lambda slot: None)  # a defect: a task that ends has no successor
            await broker.publish("t", {"n": 2})
            await until(lambda: task_slot.task is not None and task_slot.task.done(), "the task has ended")
            for path in ("/livez", "/readyz"):
                status, (trouble,) = await ask(endpoint, path)
                assert (status, trouble.partition(" cannot go on: ")[2]) == (
                    503,
                    "1 of the 1 tasks of its pool have ended",
                )
        pool._start(task_slot)
        assert (await ask(endpoint, "/livez"))[0] == 200
        with monkeypatch.context() as patch:
            patch.setattr(pool, "is_ending", True)
            status, (trouble,) = await ask(endpoint, "/livez")
            assert (status, trouble.partition(" cannot go on: ")[2]) == (503, "its pool has ended")


async def test_probes_pass_while_all_tasks_are_busy_for_long(broker: Broker) -> None:
    """A handler may take its time: a restart would only make it begin anew."""
    started, go = asyncio.Event(), asyncio.Event()

    @broker.handler("t", group="g", concurrency=1)
    async def handle(order: dict[str, int]) -> None:
        started.set()
        await go.wait()

    endpoint = Endpoint(broker, "127.0.0.1:0")
    async with endpoint.serving(), broker.running():
        for n in range(5):
            await broker.publish("t", {"n": n})
        await started.wait()
        assert broker.worker is not None
        (task_slot,) = broker.worker.consumers[0].task_slots
        begun = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() - begun > 2, "the stall limit has passed")
        assert task_slot.messages
        assert (await ask(endpoint, "/livez"))[0] == 200
        go.set()
