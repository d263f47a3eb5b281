"""Delays come right where a test stands the clock still or moves it, by freezegun and by time-machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

TOOLS = {
    "freezegun, standing": "import freezegun; tool = freezegun.freeze_time('2020-01-01', real_asyncio=True)",
    "freezegun, going on": "import freezegun; tool = freezegun.freeze_time('2020-01-01', tick=True)",
    "time-machine, standing": "import time_machine; tool = time_machine.travel('2020-01-01', tick=False)",
    "time-machine, going on": "import time_machine; tool = time_machine.travel('2040-01-01', tick=True)",
}
APPLICATION = """
import asyncio
from rsmq import Broker, Settings

async def main() -> None:
    broker, seen = Broker(delay_resolution="10ms"), []

    @broker.handler("orders", group="billing", partitions=1)
    async def bill(what: str) -> None:
        seen.append(what)
        if len(seen) == 4:
            broker.stop()

    async with broker:
        running = asyncio.create_task(broker.run())
        await broker.publish("orders", "at once", key="a")
        await broker.publish("orders", "delayed", key="b", delay="100ms")
        await broker.publish("orders", "expires", key="c", expires="10m")
        both = await broker.publish("orders", "both", key="d", delay="200ms", expires="10m")
        await running
        print(sorted(seen), (await broker.look(both)).group("billing").state)

with tool:
    asyncio.run(main())
"""


@pytest.mark.parametrize("tool", TOOLS)
def test_delays_and_expiries_under_tools_that_move_the_time(tool: str, server_url: str, prefix: str) -> None:
    """Durations count by the server's clock, and the lookup finds a message whose id has the server's time."""
    environment = {"RSMQ_URL": server_url, "RSMQ_PREFIX": prefix, "RSMQ_PREFLIGHT": "warn"}
    done = subprocess.run(
        [sys.executable, "-c", f"{TOOLS[tool]}\n{APPLICATION}"],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['at once', 'both', 'delayed', 'expires'] settled"
