"""What every test gets: one real throw-away server a session, a key prefix of its own, and a check for stray tasks."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from rsmq.connect import Client, Connector
from rsmq.keys import Keys
from rsmq.settings import Settings
from tests.servers import Server

TOGETHER = {"tests/pipeline": "spark", "tests/cluster": "cluster"}
"""Where one expensive fixture serves many files: these stay in one process when the tests run in several."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`, a process takes a file at a time, or all that shares a Spark or a cluster."""
    for item in items:
        path = item.nodeid.partition("::")[0]
        near = [place for place in TOGETHER if path.startswith(place)]
        item.add_marker(pytest.mark.xdist_group(TOGETHER[max(near, key=len)] if near else path))


@pytest.fixture(scope="session", autouse=True)
def _plain_environment() -> Iterator[None]:
    """A developer's own RSMQ_* variables must not steer the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.upper().startswith("RSMQ_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> None:
    """Who runs in the background ignores SIGINT, and so would every process that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """redis-py runs on asyncio only, and so does rsmq."""
    return "asyncio"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server that the tests of a session share. Kill it, and the others suffer: start one of your own for that."""
    with Server() as running:
        yield running


@pytest.fixture(scope="session")
def server_url(server: Server) -> str:
    """Its address."""
    return server.url


@pytest.fixture
def prefix() -> str:
    """A key prefix that only this test uses, so that no test needs FLUSH."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
def settings(server_url: str, prefix: str) -> Settings:
    """Defaults on the shared server."""
    return Settings(url=server_url, prefix=prefix)


@pytest.fixture
def keys(prefix: str) -> Keys:
    """The key catalogue of this test."""
    return Keys(prefix)


@pytest.fixture
def connector(settings: Settings) -> Connector:
    """Makes clients for the shared server."""
    assert settings.url is not None
    return Connector(settings.url, settings)


def is_of_the_runner(task: asyncio.Task[Any]) -> bool:
    """Whether anyio's test runner made it, to run this very fixture."""
    return "TestRunner" in getattr(task.get_coro(), "__qualname__", "")


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Fails a test that leaves a task running: every role ends with its scope."""
    before = asyncio.all_tasks()
    yield
    left = [task for task in asyncio.all_tasks() - before if not task.done() and not is_of_the_runner(task)]
    assert not left, f"tasks left running: {left}"


@pytest.fixture
async def client(connector: Connector, no_task_left: None) -> AsyncIterator[Client]:
    """A connected client, closed afterwards."""
    async with connector.connected() as connected:
        yield connected
