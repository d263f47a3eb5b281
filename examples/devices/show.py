"""The course of the example: start a worker and gateways, publish departures, kill a gateway, wait for all letters."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
from ledger import CONNECTED, FILE, LEFT, Entry
from passenger import passengers, phone
from rich.progress import Progress

from rsmq import Broker
from rsmq.cli.demo.flight import Departure
from rsmq.testing.ledger import Ledger

TOPIC: Final = "departures"
GATEWAYS: Final = 2
CHANGES: Final = 4
"""How many times a phone connects or disconnects during a run, on average."""
KILL_AT, RESTART_AT = 0.5, 0.6
"""When a gateway is killed and when it is started again, as parts of the whole time."""
POLL_SECONDS: Final = 0.1
PATIENCE: Final = 60.0
"""Give up after so many seconds without a change."""
INBOX_TTL: Final = "PT1H"

Process = subprocess.Popen[str]


@dataclass(frozen=True)
class Plan:
    """How many phones, which departures, published over how many seconds."""

    phones: int
    departures: list[Departure]
    seconds: float


class Run:
    """Runs a plan. The processes write their logs, and the gateways the ledger, into a folder."""

    def __init__(self, broker: Broker, plan: Plan, folder: Path, progress: Progress) -> None:
        self._plan, self._folder, self._broker = plan, folder, broker
        self._environment = {
            **os.environ,
            "RSMQ_URL": broker.url,
            "RSMQ_PREFIX": broker.settings.prefix,
            "RSMQ_INBOX_TTL": INBOX_TTL,
            "PHONES": str(plan.phones),
        }
        self.ledger = Ledger(folder / FILE, Entry)
        self.start = 0.0
        self.outage: tuple[float, float] | None = None
        self._online: set[str] = set()
        self._received: set[tuple[str, int]] = set()
        self._published = self._due = 0
        self._progress = progress
        total = sum(len(passengers(departure, plan.phones)) for departure in plan.departures)
        self._bars = {
            "departures published": progress.add_task("departures published", total=len(plan.departures)),
            "letters received": progress.add_task("letters received", total=total),
            "letters waiting": progress.add_task("letters waiting", total=total),
            "phones online": progress.add_task("phones online", total=plan.phones),
        }

    async def run(self) -> None:
        """Run until every letter was received, or nothing changes any more: the verdict then says what is missing."""
        with ExitStack() as processes:
            processes.enter_context(self._worker())
            gateways = [processes.enter_context(self._gateway(number)) for number in range(GATEWAYS)]
            await self._wait_for_phones()
            self.start = time.time()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._publish)
                tasks.start_soon(self._disturb, gateways, processes)
                await self._watch()
        self.ledger.read()

    @property
    def end(self) -> float:
        """When all phones come online, in seconds since 1970."""
        return self.start + self._plan.seconds

    # -- the course ----------------------------------------------------------------------------------------------

    async def _wait_for_phones(self) -> None:
        """Wait until phones of every gateway are online."""
        with anyio.fail_after(PATIENCE):
            while not all(self._online.intersection(self.phones_of(number)) for number in range(GATEWAYS)):
                self._poll()
                await anyio.sleep(POLL_SECONDS)

    async def _publish(self) -> None:
        """Publish all departures, evenly over the time. Those of one airport keep their order."""
        departures = self._plan.departures
        while self._published < len(departures):
            share = min(1.0, (time.time() - self.start) / self._plan.seconds)
            some = departures[self._published : round(share * len(departures))]
            await self._broker.publish_many(TOPIC, some, key=lambda departure: departure.origin)
            self._published += len(some)
            self._due += sum(len(passengers(departure, self._plan.phones)) for departure in some)
            await anyio.sleep(POLL_SECONDS)

    async def _disturb(self, gateways: list[Process], processes: ExitStack) -> None:
        """Kill a gateway, which cuts off its phones, and start it again. In the end all phones stay online."""
        await self._wait_until(KILL_AT)
        gateways[0].kill()
        gateways[0].wait()
        killed_at = time.time()
        self._poll()
        self._online.difference_update(self.phones_of(0))
        await self._wait_until(RESTART_AT)
        gateways[0] = processes.enter_context(self._gateway(0))
        self.outage = killed_at, time.time()
        await self._wait_until(1)
        for gateway in gateways:
            send_line(gateway, "stay online")

    async def _wait_until(self, part: float) -> None:
        """Wait until this part of the time is over."""
        await anyio.sleep(max(0.0, self.start + part * self._plan.seconds - time.time()))

    # -- the processes --------------------------------------------------------------------------------------------

    def phones_of(self, gateway: int) -> list[str]:
        """The phones that connect to a gateway."""
        return [phone(number) for number in range(*self._range(gateway))]

    def _range(self, gateway: int) -> tuple[int, int]:
        return self._plan.phones * gateway // GATEWAYS, self._plan.phones * (gateway + 1) // GATEWAYS

    def _gateway(self, number: int) -> AbstractContextManager[Process]:
        first, last = self._range(number)
        return self._process(
            f"gateway-{number}", "gateway.py", f"--first={first}", f"--last={last}", f"--folder={self._folder}",
            f"--mean-seconds={self._plan.seconds / CHANGES}",
        )  # fmt: skip

    @contextmanager
    def _worker(self) -> Iterator[Process]:
        with self._process("worker", "-m", "rsmq", "worker", "service:broker") as worker:
            try:
                yield worker
            finally:
                worker.terminate()

    @contextmanager
    def _process(self, name: str, *command: str) -> Iterator[Process]:
        """A process in the folder of this file, which ends when its stdin does."""
        with (self._folder / f"{name}.log").open("ab") as log:
            process = Process(
                [sys.executable, *command], cwd=Path(__file__).parent, env=self._environment, text=True,
                stdin=subprocess.PIPE, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            yield process
        finally:
            send_line(process, None)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # -- observing -----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        changed_at = time.time()
        while self.outage is None or self._published < len(self._plan.departures) or len(self._received) < self._due:
            if self._poll():
                changed_at = time.time()
            elif time.time() > max(changed_at, self.end) + PATIENCE:
                return
            await anyio.sleep(POLL_SECONDS)

    def _poll(self) -> bool:
        """Read the ledger and update the bars. Whether there was anything new."""
        new = self.ledger.read()
        for entry in new:
            if entry.event == CONNECTED:
                self._online.add(entry.phone)
            elif entry.event == LEFT:
                self._online.discard(entry.phone)
            else:
                self._received.add((entry.phone, entry.flight))
        numbers = (self._published, len(self._received), max(0, self._due - len(self._received)), len(self._online))
        for bar, number in zip(self._bars.values(), numbers, strict=True):
            self._progress.update(bar, completed=number)
        return bool(new)


def send_line(process: Process, line: str | None) -> None:
    """Write a line to the stdin of a process, or close it (None). Does nothing if the process is dead."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        if line is None:
            process.stdin.close()
        else:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
