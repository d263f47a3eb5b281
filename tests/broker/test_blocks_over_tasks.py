"""A block of a user may begin in one task and end in another, as in a fixture of pytest-asyncio."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from rsmq import Broker, Settings
from rsmq.asgi import lifespan
from rsmq.dashboard import create_app
from rsmq.model.own_tasks import Beside
from rsmq.telemetry import Endpoint
from rsmq.testing import Harness

pytestmark = pytest.mark.anyio

Block = AbstractAsyncContextManager[Any]


def served(settings: Settings) -> Broker:
    broker = Broker(settings)

    @broker.handler("t", group="g", partitions=1)
    async def note(n: int) -> None: ...

    return broker


@asynccontextmanager
async def device(settings: Settings) -> Any:
    async with Broker(settings) as broker:
        session = broker.connect("d")
        await asyncio.create_task(session.__aenter__())
        yield
        await asyncio.create_task(session.__aexit__(None, None, None))


BLOCKS: dict[str, Callable[[Settings], Block]] = {
    "async with broker": served,
    "running": lambda settings: served(settings).running(),
    "connect": device,
    "harness": lambda settings: Harness(served(settings), url=settings.url or "", prefix=settings.prefix),
    "lifespan": lambda settings: lifespan(served(settings), worker=True)(Starlette()),
    "dashboard": lambda settings: (app := create_app(settings)).router.lifespan_context(app),
    "metrics": lambda settings: Endpoint(served(settings), "127.0.0.1:0").serving(),
}


@pytest.mark.parametrize("name", BLOCKS)
async def test_a_block_ends_in_another_task(name: str, rsmq_settings: Settings) -> None:
    before = asyncio.all_tasks()
    block = BLOCKS[name](rsmq_settings)
    await asyncio.create_task(block.__aenter__())
    await asyncio.create_task(block.__aexit__(None, None, None))
    assert not {task for task in asyncio.all_tasks() - before if not task.done()}


FIXTURES = """
import unittest, pytest
from rsmq import Broker
from rsmq.testing import Harness

broker = Broker(partitions=1)

@broker.handler("t", group="g")
async def note(n: int) -> None: ...

class TestNote(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self) -> None:
        self.queue = Harness(broker, url=URL, prefix=PREFIX)
        await self.queue.__aenter__()

    async def asyncTearDown(self) -> None:
        await self.queue.__aexit__(None, None, None)

    async def test_one(self) -> None:
        [outcome] = await self.queue.publish_and_handle("t", 1)
        assert outcome.is_done

@pytest.fixture
async def queue(rsmq_harness):
    async with rsmq_harness(broker) as test:
        yield test

async def test_two(queue) -> None:
    [outcome] = await queue.publish_and_handle("t", 1)
    assert outcome.is_done
"""


def test_fixtures_of_pytest_asyncio_and_unittest(rsmq_url: str, rsmq_prefix: str, tmp_path: Path) -> None:
    test = tmp_path / "test_fixtures.py"
    test.write_text(f"URL, PREFIX = {rsmq_url!r}, {rsmq_prefix!r}\n{FIXTURES}")
    options = ("-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "-o", f"rsmq_url={rsmq_url}")
    options += ("-o", "asyncio_default_fixture_loop_scope=function", f"--rootdir={tmp_path}")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(test)], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout
    assert "2 passed" in run.stdout


class Broken(Exception):
    pass


async def failing(*, task_status: Any) -> None:
    task_status.started()
    await asyncio.sleep(0)
    raise Broken


async def test_what_runs_beside_a_block_ends_it_with_its_error() -> None:
    with pytest.raises(Broken):
        async with Beside(failing):
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()  # what follows is not cancelled


async def test_its_error_is_raised_where_the_block_ends() -> None:
    block = Beside(failing)
    await asyncio.create_task(block.__aenter__())
    await asyncio.wait((block.task,))
    with pytest.raises(Broken):
        await block.__aexit__(None, None, None)


async def test_an_error_of_the_block_and_one_beside_it_are_both_raised() -> None:
    block = Beside(failing)

    async def fail_too() -> None:
        async with block:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise KeyError("x") from None

    with pytest.raises(BaseExceptionGroup) as caught:
        await fail_too()
    assert caught.group_contains(Broken)
    assert caught.group_contains(KeyError)


async def test_a_block_that_never_begins_leaves_nothing() -> None:
    async def slow(*, task_status: Any) -> None:
        await asyncio.Event().wait()

    block = Beside(slow)
    entering = asyncio.create_task(block.__aenter__())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert block.task.done()
