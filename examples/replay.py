"""A topic is a log: what was handled can be handled again, by the same group or by one that did not exist yet.

    python examples/replay.py

A group is reset to the earliest message and to a time; a new group starts at a time. The same from the command line:
`rsmq group reset readings dashboard --to earliest`.
"""

import asyncio
from datetime import UTC, datetime

from rsmq import Broker

TOPIC = "readings"

broker = Broker()
handled = asyncio.Queue[str]()


@broker.handler(TOPIC, group="dashboard")
async def show(reading: str) -> None:
    handled.put_nowait(reading)


async def report(reading: str) -> None:
    handled.put_nowait(reading)


async def work(what: str, count: int) -> None:
    """Run the worker until it has handled `count` readings, and print them."""
    async with broker.running():
        readings = [await handled.get() for _ in range(count)]
    assert handled.empty(), "more was handled than expected"
    print(f"{what:<32} {' '.join(readings)}")


async def main() -> None:
    async with broker:
        if await broker.topics.find(TOPIC):
            await broker.topics.delete(TOPIC)  # what an earlier run of this example has left

        await publish("08:00", "09:00", "10:00")
        noon = datetime.now(UTC)
        await publish("13:00", "14:00")
        await work("dashboard, first time", 5)

        await broker.reset_group(TOPIC, "dashboard", to="earliest")
        await work("dashboard, reset to earliest", 5)

        await broker.reset_group(TOPIC, "dashboard", to=noon)
        await work("dashboard, reset to noon", 2)

        broker.handler(TOPIC, group="report", start=noon)(report)
        await work("report, a new group from noon", 2)


async def publish(*readings: str) -> None:
    """Under one key, so that they are handled in this order; then let the clock move on."""
    for reading in readings:
        await broker.publish(TOPIC, reading, key="sensor-1")
    await asyncio.sleep(0.01)


asyncio.run(main())
