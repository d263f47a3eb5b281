"""How long the messages of a killed worker stay undone: SIGKILL with fifty in flight, another worker there at once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from benchmarks.peers.measure import HEADER_SIZE, Bench, Failed, Result, complaint, read_marks
from benchmarks.peers.system import HELD

FED = 2000
"""Ids of the messages that keep coming while it recovers, two a second."""
HOLD_SECONDS = 30.0


def recover(bench: Bench, limit: float, *, tuned: bool) -> Result:
    """Seconds from the kill until the first and the last of the fifty were handled by the other worker.

    `all` is None where that took longer than `limit`; `done` says how many were. Raises Failed.
    """
    with bench.directory() as first, bench.directory() as second, contextlib.ExitStack() as stack:
        bench.server.empty()
        doomed = stack.enter_context(
            bench.worker(first, FED, mode="hold", concurrency=HELD, tuned=tuned, prepares=True)
        )
        stack.enter_context(bench.worker(second, FED, concurrency=HELD, tuned=tuned))
        (first / "go").touch()
        time.sleep(1.5)
        stack.enter_context(bench.process(second, "feed", FED, tuned=tuned))
        held = wait_until_held(first, second)
        killed = time.time()
        os.killpg(doomed.pid, signal.SIGKILL)
        (second / "go").touch()
        (second / "killed").touch()
        return {"held": held, "limit": limit} | watch(second, killed, limit)


def wait_until_held(directory: Path, feeder: Path) -> int:
    """Until fifty handlers hang. Some systems take fewer at once: then what they have after a while."""
    deadline, held = time.monotonic() + HOLD_SECONDS, 0
    while held < HELD and time.monotonic() < deadline:
        time.sleep(0.05)
        held = read_marks(directory, FED).total
    if not held:
        raise Failed(f"the worker that was to be killed took no message{complaint(directory) or complaint(feeder)}")
    return held


def watch(directory: Path, killed: float, limit: float) -> Result:
    """Wait for the fifty."""
    first = None
    while True:
        done, now = done_of_held(directory), time.time()
        if done and first is None:
            first = now - killed
        if done >= HELD or now - killed > limit:
            return {"first": first, "all": now - killed if done >= HELD else None, "done": done}
        time.sleep(0.01)


def done_of_held(directory: Path) -> int:
    """How many of the fifty the other worker has handled."""
    return max(
        (HELD - path.read_bytes()[HEADER_SIZE:][:HELD].count(0) for path in directory.glob("marks.*")), default=0
    )
