"""What runs inside a peer's process: the payload, the handler that counts, the roles. Standard library only.

A system subclasses `System`; everything that is measured goes through here, so that all do the same work. A worker
marks every message it handles in a file (a byte per id), which the coordinator reads: nothing is asked of the peer, and
what is lost or handled twice shows.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import mmap
import os
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELD = 50
"""Messages a worker has in flight when it is killed."""

HEADER = struct.Struct("<dddd")
"""First and last time of a handling, CPU seconds at the first, CPU seconds now."""

SAMPLE_SECONDS = 0.05
WARM_UP = 20
Payload = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What the coordinator tells a process."""

    role: str
    """`work`, or one of the publishing `ROLES`."""
    url: str
    directory: str
    """Where marks and signals are."""
    count: int
    variant: str = ""
    mode: str = "count"
    """What the handler does besides counting: `latency` notes how long the message was under way, `hold` never ends."""
    concurrency: int = 64
    tuned: bool = False
    """With the documented settings for a fast recovery."""
    prepares: bool = False
    """A worker that is there before the first message makes what has to exist."""


def payload(i: int, sent: float = 0.0) -> Payload:
    """200 bytes of JSON, as near as the digits allow."""
    return {"i": i, "sent": sent, "event": "order.created", "tenant": "acme-corp", "ok": True, "data": "x" * 112}


class Marks:
    """The file of one worker process: a header and a byte for each id. Opened at its first message."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._map: mmap.mmap | None = None
        self._delays: list[float] = []
        self._opening = threading.Lock()
        self.first, self.last, self.cpu = 0.0, 0.0, 0.0

    def mark(self, message: Payload) -> None:
        """Note one handled message."""
        marks = self._map or self._open()
        self.last = now = time.time()
        marks[HEADER.size + message["i"]] = min(255, marks[HEADER.size + message["i"]] + 1)
        if message["sent"]:
            self._delays.append(now - message["sent"])

    def _open(self) -> mmap.mmap:
        with self._opening:  # the first messages may come to several threads at once
            if self._map is None:
                path = Path(self._options.directory, f"marks.{os.getpid()}")
                unfinished = path.with_name(f"new.{os.getpid()}")
                unfinished.write_bytes(bytes(HEADER.size + self._options.count))
                unfinished.rename(path)
                self.first, self.cpu = time.time(), time.process_time()
                with path.open("r+b") as file:
                    self._map = mmap.mmap(file.fileno(), 0)
                threading.Thread(target=self._sample, daemon=True).start()
            return self._map

    def _sample(self) -> None:
        """CPU time is read beside the work, not in it."""
        assert self._map is not None
        delays = Path(self._options.directory, f"delays.{os.getpid()}")
        while True:
            HEADER.pack_into(self._map, 0, self.first, self.last, self.cpu, time.process_time())
            if self._delays:
                taken, self._delays = self._delays, []
                with delays.open("a") as file:
                    file.writelines(f"{delay:.7f}\n" for delay in taken)
            time.sleep(SAMPLE_SECONDS)


class System(ABC):
    """One queue. Subclasses say how to connect, publish and work; constructors do no I/O.

    `publish` may be a coroutine function or, where the library blocks, a plain one.
    """

    publish: Callable[[Payload], Any]

    def __init__(self, options: Options) -> None:
        self.options = options
        self.url, self.variant, self.tuned = options.url, options.variant, options.tuned
        self.concurrency = options.concurrency
        self._marks = Marks(options)
        self._is_holding = options.mode == "hold"

    async def open(self) -> None:  # noqa: B027 - a hook
        """Connect for publishing."""

    async def prepare(self) -> None:  # noqa: B027 - a hook
        """Make what has to exist before the first message; the server is empty."""

    async def close(self) -> None:  # noqa: B027 - a hook
        """Let go of what `open` took."""

    async def publish_fast(self, payloads: list[Payload]) -> None:
        """The quickest documented way; without a bulk call that is 64 at once."""
        await concurrently(self.publish, payloads)

    @abstractmethod
    def work(self) -> None:
        """Be a worker until a signal ends the process."""

    async def handle(self, message: Payload) -> None:
        """The body of every handler that is a coroutine."""
        self._marks.mark(message)
        if self._is_holding:
            await asyncio.sleep(3600)

    def handle_sync(self, message: Payload) -> None:
        """The body of every handler that is a plain function."""
        self._marks.mark(message)
        if self._is_holding:
            time.sleep(3600)


def run_loop(main: Coroutine[Any, Any, Any]) -> None:
    """Run on uvloop, as every system here does that can."""
    import uvloop

    uvloop.run(main)


async def concurrently(publish: Callable[[Payload], Any], payloads: list[Payload], width: int = 64) -> None:
    """`width` publishers, each awaiting one publish after the other; threads where the library blocks."""
    source = iter(payloads)
    if inspect.iscoroutinefunction(publish):

        async def publisher() -> None:
            for each in source:
                await publish(each)

        await asyncio.gather(*[publisher() for _ in range(width)])
        return
    lock = threading.Lock()

    def thread() -> None:
        while True:
            with lock:
                each = next(source, None)
            if each is None:
                return
            publish(each)

    threads = [threading.Thread(target=thread) for _ in range(width)]
    for each in threads:
        each.start()
    for each in threads:
        await asyncio.to_thread(each.join)


async def one_by_one(publish: Callable[[Payload], Any], payloads: list[Payload]) -> None:
    """Each publish awaited before the next."""
    for each in payloads:
        if inspect.isawaitable(done := publish(each)):
            await done


async def timed(publishing: Coroutine[Any, Any, None], count: int) -> dict[str, float]:
    """CPU microseconds a message and messages a second."""
    cpu, began = time.process_time(), time.perf_counter()
    await publishing
    return {"cpu_us": (time.process_time() - cpu) / count * 1e6, "rate": count / (time.perf_counter() - began)}


async def publish(system: System) -> dict[str, Any]:
    """Ids 0 … count-1 by the fast way."""
    await system.publish_fast([])  # what is set up at the first call is not measured
    messages = [payload(i) for i in range(system.options.count)]
    return {"fast": await timed(system.publish_fast(messages), len(messages))}


async def spread(system: System) -> dict[str, Any]:
    """Ids 0 … count-1: a tenth of them one by one, the others 64 at once."""
    messages = [payload(i) for i in range(system.options.count)]
    some = messages[: max(1, len(messages) // 10)]
    rest = messages[len(some) :]
    return {
        "one": await timed(one_by_one(system.publish, some), len(some)),
        "concurrent": await timed(concurrently(system.publish, rest), len(rest)),
    }


async def trickle(system: System) -> dict[str, Any]:
    """A message every five milliseconds, stamped, after a few that warm up."""
    for i in range(WARM_UP):
        await one_by_one(system.publish, [payload(i)])
        await asyncio.sleep(0.02)
    began, tasks = time.perf_counter(), []
    for i in range(WARM_UP, system.options.count):
        await asyncio.sleep(max(0.0, began + (i - WARM_UP) / 200 - time.perf_counter()))
        done = system.publish(payload(i, time.time()))
        if inspect.isawaitable(done):
            tasks.append(asyncio.ensure_future(done))
    await asyncio.gather(*tasks)
    return {}


async def feed(system: System) -> dict[str, Any]:
    """Fifty messages, then, once the worker that has them is dead, two a second until stopped."""
    await one_by_one(system.publish, [payload(i) for i in range(HELD)])
    while not Path(system.options.directory, "killed").exists():
        await asyncio.sleep(0.05)
    for i in range(HELD, system.options.count):
        await one_by_one(system.publish, [payload(i)])
        await asyncio.sleep(0.5)
    return {}


ROLES = {"publish": publish, "spread": spread, "trickle": trickle, "feed": feed}


async def publish_as(system: System) -> None:
    """One of the publishing roles; its figures go to standard output."""
    await system.open()
    if system.options.role in ("publish", "spread"):  # for the others the worker that waits has done it
        await system.prepare()
    result = await ROLES[system.options.role](system)
    await system.close()
    print(json.dumps(result), flush=True)


def main(kind: type[System]) -> None:
    """The whole of a peer's process: one role of one system."""
    options = Options(**json.loads(sys.argv[1]))
    system = kind(options)
    if options.role == "work":
        if options.prepares and kind.prepare is not System.prepare:
            run_loop(prepare(kind(options)))
        Path(options.directory, f"ready.{os.getpid()}").touch()
        while not Path(options.directory, "go").exists():
            time.sleep(0.002)
        system.work()
    else:
        run_loop(publish_as(system))


async def prepare(system: System) -> None:
    """Connect for it, and let go again."""
    await system.open()
    await system.prepare()
    await system.close()
