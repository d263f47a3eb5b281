"""The worker and publisher processes of a run: started, killed, paused, stopped and replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import Popen
from typing import Self

import anyio
from pydantic_core import to_json

from rsmq.testing.worker_process import WorkerProcess
from tests import forks
from tests.chaos.ledger import EventLedger
from tests.chaos.publisher import PublisherJob
from tests.chaos.release_process import ReleaseJob
from tests.chaos.supervised import SupervisedJob
from tests.chaos.worker import Job

ROOT = Path(__file__).parents[2]
AnyJob = Job | PublisherJob | ReleaseJob | SupervisedJob


class ChaosProcess(WorkerProcess):
    """One worker or publisher process. `environment` is added to that of the tests."""

    _process: Popen[bytes] | forks.ForkedProcess  # type: ignore[assignment]

    def __init__(self, job: AnyJob, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.module = job.module
        env = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
        if environment or isinstance(job, ReleaseJob):  # what is imported, or a library below it, may differ
            super().__init__(job, log, env)
            return
        with log.open("ab") as output:
            self._process = forks.start(self.module, to_json(job).decode(), cwd=ROOT, env=env, stdout=output)
        self.is_paused = False

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """SIGTERM: it may finish what it has started."""
        self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        """Send any signal."""
        self._process.send_signal(number)

    async def ended(self, seconds: float = 40) -> int:
        """Wait until it has ended by itself; returns its exit code."""
        deadline = time.monotonic() + seconds
        while self.is_running:
            assert time.monotonic() < deadline, f"worker {self.pid} still runs after {seconds:g} s"
            await anyio.sleep(0.02)
        return self._process.wait()


class Processes:
    """The worker and publisher processes of one run."""

    def __init__(self, job: Job, ledger: EventLedger) -> None:
        self.job, self._ledger = job, ledger
        self.workers: list[ChaosProcess] = []
        self.publishers: list[ChaosProcess] = []

    @property
    def pids(self) -> set[int]:
        """All workers, also those that have ended."""
        return {worker.pid for worker in self.workers}

    @property
    def living(self) -> list[ChaosProcess]:
        """The workers that have not ended."""
        return [worker for worker in self.workers if worker.is_running]

    def start_worker(self, job: AnyJob | None = None, environment: Mapping[str, str] | None = None) -> ChaosProcess:
        """Start a worker without waiting until it serves. `environment` is added to that of the tests."""
        worker = ChaosProcess(self.job if job is None else job, self.path, environment)
        self.workers.append(worker)
        return worker

    async def start_workers(
        self, count: int = 1, job: AnyJob | None = None, environment: Mapping[str, str] | None = None
    ) -> list[ChaosProcess]:
        """Start workers and wait until they serve."""
        new = [self.start_worker(job, environment) for _ in range(count)]
        await self.ready(new)
        return new

    async def start_publisher(self, job: AnyJob, environment: Mapping[str, str] | None = None) -> ChaosProcess:
        """Start a publisher and wait until it is connected."""
        publisher = ChaosProcess(job, self.path, environment)
        self.publishers.append(publisher)
        await self.ready([publisher])
        return publisher

    async def ready(self, new: list[ChaosProcess]) -> None:
        """Wait until these processes serve or publish."""
        deadline = time.monotonic() + 60
        while not {each.pid for each in new} <= self._ledger.pids("ready"):
            assert all(each.is_running for each in new), f"a process ended at its start: {self.log()}"
            assert time.monotonic() < deadline, f"processes do not start: {self.log()}"
            await anyio.sleep(0.02)

    async def stop_all(self, seconds: float = 40) -> list[ChaosProcess]:
        """Send SIGTERM to all processes; returns those that had to be killed."""
        running = [each for each in (*self.publishers, *self.workers) if each.is_running]
        for process in running:
            if process.is_paused:
                process.resume()
            process.terminate()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(each.is_running for each in running):
            await anyio.sleep(0.02)
        stubborn = [each for each in running if each.is_running]
        for process in stubborn:
            process.kill()
        return stubborn

    @property
    def path(self) -> Path:
        """The file that all of them print to."""
        return self._ledger.path.with_suffix(".log")

    @asynccontextmanager
    async def supervised(self) -> AsyncIterator[None]:
        """Replace each worker that ends during the block."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._replace_dead)
            yield
            tasks.cancel_scope.cancel()

    async def _replace_dead(self) -> None:
        replaced: set[int] = set()
        while True:
            for worker in list(self.workers):
                if not worker.is_running and worker.pid not in replaced:
                    replaced.add(worker.pid)
                    self.start_worker()
            await anyio.sleep(0.02)

    def log(self, size: int = 6000) -> str:
        """The last part of what the processes have printed."""
        return self.path.read_text(errors="replace")[-size:] if self.path.exists() else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.publishers, *self.workers):
            process.kill()
