"""The crew: worker processes that are started, killed, paused and replaced."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import anyio

from tests.chaos.ledger import Ledger
from tests.chaos.worker import Job

ROOT = Path(__file__).parents[2]


class Hand:
    """One worker process. Its log goes beside the ledger."""

    def __init__(self, job: Job, log: Path) -> None:
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.worker", job.line()], cwd=ROOT, stdout=self._log, stderr=self._log
        )
        self.is_paused = False

    @property
    def pid(self) -> int:
        """The process id: its name in the ledger."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def pause(self) -> None:
        """SIGSTOP."""
        self.is_paused = True
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)
        self.is_paused = False

    def terminate(self) -> None:
        """SIGTERM: it may finish what it has begun."""
        self._process.send_signal(signal.SIGTERM)

    async def ended(self, seconds: float = 40) -> int:
        """Wait until it has ended by itself; returns its exit code."""
        deadline = time.monotonic() + seconds
        while self.exit_code is None:
            assert time.monotonic() < deadline, f"worker {self.pid} still runs after {seconds:g} s"
            await anyio.sleep(0.02)
        return self._process.returncode

    def close(self) -> None:
        """End it, whatever state it is in."""
        if self.exit_code is None:
            self.kill()
        self._log.close()


class Crew:
    """The worker processes of one scene."""

    def __init__(self, job: Job, ledger: Ledger) -> None:
        self.job, self._ledger = job, ledger
        self.hands: list[Hand] = []

    @property
    def pids(self) -> set[int]:
        """Everybody, the dead ones too."""
        return {hand.pid for hand in self.hands}

    def start(self, job: Job | None = None) -> Hand:
        """Start a worker; it may be long until it serves."""
        hand = Hand(self.job if job is None else job, self._ledger.path.with_suffix(".log"))
        self.hands.append(hand)
        return hand

    async def hire(self, count: int = 1, job: Job | None = None) -> list[Hand]:
        """Start workers and wait until they serve."""
        new = [self.start(job) for _ in range(count)]
        deadline = time.monotonic() + 40
        while not {hand.pid for hand in new} <= self._ledger.pids("ready"):
            assert all(hand.exit_code is None for hand in new), f"a worker ended at its start: {self.log()}"
            assert time.monotonic() < deadline, f"workers do not start: {self.log()}"
            await anyio.sleep(0.02)
        return new

    @asynccontextmanager
    async def supervised(self) -> AsyncIterator[None]:
        """For each worker that ends during the block, a new one."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._replace_dead)
            yield
            tasks.cancel_scope.cancel()

    async def _replace_dead(self) -> None:
        replaced: set[int] = set()
        while True:
            for hand in list(self.hands):
                if hand.exit_code is not None and hand.pid not in replaced:
                    replaced.add(hand.pid)
                    self.start()
            await anyio.sleep(0.02)

    def log(self, size: int = 6000) -> str:
        """The end of what the workers have printed."""
        return self._ledger.path.with_suffix(".log").read_text(errors="replace")[-size:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for hand in self.hands:
            hand.close()
