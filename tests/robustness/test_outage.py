"""While the server is away a worker waits: it uses little CPU, logs little, and recovers by itself."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from rsmq import Broker, Settings
from tests.patience import until
from tests.servers import Server

IS_LONG = os.environ.get("CHAOS") == "long"
SECONDS = 5.0 if IS_LONG else 1.0
MOST_CPU = 0.3
"""Of one core, in the mean. A loop without a pause takes all of it."""
MOST_LINES = 40
"""From INFO on, at the beginning: each of the eight leases is lost, and each role logs once that it waits."""
MOST_LATER = 3.0
"""A second, after the beginning."""
if IS_LONG:
    pytestmark = pytest.mark.chaos

STATES: dict[str, tuple[Callable[[Server], None], Callable[[Server], object]]] = {
    "idle": (lambda server: None, lambda server: None),
    "gone": (Server.kill, Server.start),
    "frozen": (Server.pause, Server.resume),
}


def is_silent(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether nothing was logged for half a second."""
    return not caplog.records or time.time() - caplog.records[-1].created > 0.5


@pytest.mark.parametrize(
    ("state", "distribution"), [("idle", "hash"), ("gone", "hash"), ("frozen", "hash"), ("gone", "shared")]
)
async def test_worker_without_a_server_uses_little_cpu_and_log(
    state: str, distribution: Any, caplog: pytest.LogCaptureFixture, no_task_left: None
) -> None:
    """CPU and log lines are bounded while the server does not answer; afterwards messages are handled again."""
    leave, come = STATES[state]
    with Server(aof=True) as server, caplog.at_level(logging.INFO, "rsmq"):
        broker, done = Broker(Settings(url=server.url)), list[int]()

        @broker.handler("t", group="g", distribution=distribution, ordering="none")
        async def handle(payload: dict[str, int]) -> None:
            done.append(payload["n"])

        async with broker.running():
            await broker.publish("t", {"n": 1})
            await until(lambda: 1 in done, "the first message is handled")
            leave(server)
            caplog.clear()
            cpu, begin = time.process_time(), time.monotonic()
            await anyio.sleep(SECONDS)  # the test measures what the worker does meanwhile
            await until(lambda: is_silent(caplog), "the log is silent")  # a busy machine says it later
            first = len(caplog.records)
            await anyio.sleep(SECONDS)
            cpu, later = (time.process_time() - cpu) / (time.monotonic() - begin), len(caplog.records) - first
            come(server)
            await broker.publish("t", {"n": 2})
            await until(lambda: 2 in done, "it is back at work")
    assert cpu < MOST_CPU
    assert first <= MOST_LINES, [record.getMessage() for record in caplog.records]
    assert later <= MOST_LATER * SECONDS, [record.getMessage() for record in caplog.records]
