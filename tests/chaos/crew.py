"""The crew: worker processes that are started, killed, paused and replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import anyio

from tests.chaos.ledger import Ledger
from tests.chaos.publisher import Errand
from tests.chaos.worker import Job

ROOT = Path(__file__).parents[2]


class Hand:
    """One worker or publisher process. Its log goes beside the ledger."""

    def __init__(self, job: Job | Errand, log: Path, environment: Mapping[str, str] = os.environ) -> None:
        self._log = log.open("ab")
        module = "tests.chaos.worker" if isinstance(job, Job) else "tests.chaos.publisher"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, job.line()],
            cwd=ROOT, stdout=self._log, stderr=self._log, env=dict(environment),
        )  # fmt: skip
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

    def signal(self, number: signal.Signals) -> None:
        """Any other signal."""
        self._process.send_signal(number)

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
        else:
            self._process.wait()
        self._log.close()


class Crew:
    """The worker and publisher processes of one scene."""

    def __init__(self, job: Job, ledger: Ledger) -> None:
        self.job, self._ledger = job, ledger
        self.hands: list[Hand] = []
        self.publishers: list[Hand] = []

    @property
    def pids(self) -> set[int]:
        """All workers, the dead ones too."""
        return {hand.pid for hand in self.hands}

    @property
    def living(self) -> list[Hand]:
        """The workers that have not ended."""
        return [hand for hand in self.hands if hand.exit_code is None]

    def start(self, job: Job | None = None, environment: Mapping[str, str] | None = None) -> Hand:
        """Start a worker; it may be long until it serves. `environment` is added to ours."""
        hand = Hand(self.job if job is None else job, self.path, {**os.environ, **(environment or {})})
        self.hands.append(hand)
        return hand

    async def hire(
        self, count: int = 1, job: Job | None = None, environment: Mapping[str, str] | None = None
    ) -> list[Hand]:
        """Start workers and wait until they serve."""
        new = [self.start(job, environment) for _ in range(count)]
        await self.ready(new)
        return new

    async def send(self, errand: Errand) -> Hand:
        """Start a publisher and wait until it is connected."""
        hand = Hand(errand, self.path)
        self.publishers.append(hand)
        await self.ready([hand])
        return hand

    async def ready(self, new: list[Hand]) -> None:
        """Wait until these processes are at work."""
        deadline = time.monotonic() + 60
        while not {hand.pid for hand in new} <= self._ledger.pids("ready"):
            assert all(hand.exit_code is None for hand in new), f"a process ended at its start: {self.log()}"
            assert time.monotonic() < deadline, f"processes do not start: {self.log()}"
            await anyio.sleep(0.02)

    async def dismiss(self, seconds: float = 40) -> list[Hand]:
        """Ask everybody to stop; returns those who had to be killed."""
        everybody = [hand for hand in (*self.publishers, *self.hands) if hand.exit_code is None]
        for hand in everybody:
            if hand.is_paused:
                hand.resume()
            hand.terminate()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(hand.exit_code is None for hand in everybody):
            await anyio.sleep(0.02)
        stubborn = [hand for hand in everybody if hand.exit_code is None]
        for hand in stubborn:
            hand.kill()
        return stubborn

    @property
    def path(self) -> Path:
        """Where all of them print to."""
        return self._ledger.path.with_suffix(".log")

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
        return self.path.read_text(errors="replace")[-size:] if self.path.exists() else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for hand in (*self.publishers, *self.hands):
            hand.close()
