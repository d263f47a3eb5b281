"""`python -m tests.figures.way`, in a checkout: follow one message, and print the calls and files of its way as JSON.

It runs in a process of its own, with the code of its checkout, on an embedded server.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
from tenacity import wait_fixed

import rsmq
from rsmq import Broker, RetryPolicy

ROOT = Path(rsmq.__file__).parent
UPKEEP = (
    "heartbeat/", "worker/", "broker/connection", "broker/portal", "auditor", "retention", "eviction", "presence",
    "loop_monitor",
)  # fmt: skip
"""Files whose calls go on without a message."""
BEFORE = 0.6
"""Seconds in which what is left of the message before ends."""
AFTER = 0.05
"""Seconds in which a message is settled after its handler has returned."""


class Trace:
    """Notes each call of a function of rsmq, once for each of its frames."""

    def __init__(self, skipped: tuple[str, ...]) -> None:
        self.skipped = skipped
        self.calls: list[tuple[str, str]] = []
        self._frames: dict[int, FrameType] = {}

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(str(ROOT)) or id(frame) in self._frames:
            return
        self._frames[id(frame)] = (
            frame  # a coroutine that goes on is no further call; kept, so that its id stays its own
        )
        file = Path(name).relative_to(ROOT).as_posix()
        if not any(each in file for each in self.skipped):
            self.calls.append((file, frame.f_code.co_name))

    def __enter__(self) -> Trace:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def figures(self) -> dict[str, Any]:
        """Calls, files, and the lines of those files."""
        files = sorted({file for file, _ in self.calls})
        lines = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files)
        return {"calls": len(self.calls), "files": files, "lines": lines}


async def publish() -> Trace:
    """One call of `publish`, in a process that handles nothing."""
    async with Broker() as broker:
        await broker.publish("orders", {"n": 1}, key="k")
        await anyio.sleep(BEFORE)
        with Trace(UPKEEP) as trace:
            await broker.publish("orders", {"n": 2}, key="k")
    return trace


async def handled(broker: Broker, count: Callable[[], int], calls: int) -> Trace:
    """One message from its publish until it is settled, when the handler has been called so often in all."""
    async with broker.running():
        await broker.publish("orders", {"n": 1}, key="k")
        await reached(count, 1)
        await anyio.sleep(BEFORE)
        with Trace(UPKEEP) as trace:
            await asyncio.to_thread(broker.publish_sync, "orders", {"n": 2}, key="k")
            await reached(count, calls)
    return trace


async def reached(count: Callable[[], int], number: int) -> None:
    """Wait until the handler was called so often, and its message is settled."""
    while count() < number:
        await anyio.sleep(0.02)
    await anyio.sleep(AFTER)


async def read() -> Trace:
    """A message is read, handled and settled."""
    broker, seen = Broker(), list[dict[str, Any]]()

    @broker.handler("orders", group="g")
    async def handle(order: dict[str, Any]) -> None:
        seen.append(order)

    return await handled(broker, lambda: len(seen), 2)


async def park() -> Trace:
    """A message fails, is parked, comes back, and is settled."""
    broker, seen = Broker(), list[dict[str, Any]]()

    @broker.handler("orders", group="g", retry=RetryPolicy(max_attempts=3, wait=wait_fixed(0.3)))
    async def handle(order: dict[str, Any]) -> None:
        seen.append(order)
        if len(seen) == 2:
            raise ValueError("once")

    return await handled(broker, lambda: len(seen), 3)


async def letter() -> Trace:
    """A letter is sent, read by the session of its device, and acknowledged."""
    async with Broker() as broker, broker.connect("phone") as session:
        await broker.send("phone", {"n": 1})
        await session.ack(await anext(session))
        await session.flush()
        await anyio.sleep(BEFORE)
        with Trace(UPKEEP) as trace:
            await broker.send("phone", {"n": 2})
            await session.ack(await anext(session))
            await session.flush()
    return trace


WAYS: dict[str, Callable[[], Awaitable[Trace]]] = {
    "publish": publish, "read to settled": read, "park and back": park, "letter": letter
}  # fmt: skip


def main() -> None:
    """Follow the way that is named."""
    for name in [each for each in os.environ if each.startswith("RSMQ_")]:
        del os.environ[name]
    with tempfile.TemporaryDirectory(prefix="figures-") as directory:
        os.chdir(directory)  # the embedded server of this directory is used by nothing else
        try:
            trace = asyncio.run(WAYS[sys.argv[1]]())  # type: ignore[arg-type]
        finally:
            os.chdir("/")
    print(json.dumps(trace.figures()))


if __name__ == "__main__":
    main()
