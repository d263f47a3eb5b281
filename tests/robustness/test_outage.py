"""While the server is away a worker waits: it burns no CPU, fills no log, and is back by itself."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from rsmq import Broker, Settings
from tests.contract.witness import until
from tests.servers import Server

IS_LONG = os.environ.get("CHAOS") == "long"
SECONDS = 10.0 if IS_LONG else 2.0
MOST_CPU = 0.3
"""Of one core, in the mean. A loop without a pause takes all of it."""
MOST_LINES = 5.0
"""A second, from INFO on."""
if IS_LONG:
    pytestmark = pytest.mark.chaos

STATES: dict[str, tuple[Callable[[Server], None], Callable[[Server], object]]] = {
    "idle": (lambda server: None, lambda server: None),
    "gone": (Server.kill, Server.start),
    "frozen": (Server.pause, Server.resume),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_an_absent_server_costs_next_to_nothing(
    state: str, distribution: Any, caplog: pytest.LogCaptureFixture, no_task_left: None
) -> None:
    """CPU and log lines are bounded while nobody answers; afterwards messages are handled without a restart."""
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
            cpu = time.process_time()
            await anyio.sleep(SECONDS)  # what it does meanwhile is the thing under test
            cpu = time.process_time() - cpu
            lines = len([record for record in caplog.records if record.levelno >= logging.INFO])
            come(server)
            await broker.publish("t", {"n": 2})
            await until(lambda: 2 in done, "it is back at work")
    assert cpu < MOST_CPU * SECONDS
    assert lines <= MOST_LINES * SECONDS + 8, [record.getMessage() for record in caplog.records][:20]
