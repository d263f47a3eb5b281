"""PUSH, SMS, AlimTalk with users who read or do not, while workers are killed at random. Ends with a verdict.

python examples/notifications/run.py
python examples/notifications/run.py --notifications 2000 --kills 10
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import anyio
import anyio.abc
import typer
from channels import ALIMTALK, PER, PUSH, SMS, Notification

from rsmq import Broker, Settings

CHANNELS: Final = (PUSH.name, SMS.name, ALIMTALK.name)
LIMITS: Final = {
    (each.name, of): limit
    for each in (PUSH, SMS, ALIMTALK)
    for of, limit in (("all", each.calls), ("a user", each.to_a_user))
}
NEVER: Final = len(CHANNELS)
READERS: Final = (0, 0, 0, 1, NEVER)
"""From which channel on a user reads: three of five the PUSH, one not before the SMS, one nothing."""
SLOWEST: Final = 3.0
"""Seconds until a user has read it: longer than the two after which the next step is due."""
WORKERS: Final = 2
USERS: Final = 20
GUESTS: Final = 4
"""So many of the users have no app: the PUSH fails at once, and the SMS follows."""
PER_SECOND: Final = 60
MARGIN: Final = 0.1
"""Seconds that may pass between the start of a handler, which the limits count, and the call of the provider."""
PATIENCE: Final = 60.0
"""Give up after so many seconds in which nothing was sent or read."""
POLL_SECONDS: Final = 0.05


@dataclass(frozen=True)
class Event:
    """What a provider has taken, or that a receipt (`READ`) was processed."""

    number: str
    what: str


@dataclass(frozen=True)
class Call:
    """A call of a provider, also one that it has refused."""

    channel: str
    user: str
    at: float


@dataclass(frozen=True)
class Verdict:
    """What came of the notifications. The last four break a promise."""

    sent: Counter[str]
    repeated: Counter[str]
    receipts: int
    busiest: dict[tuple[str, str], int]
    lost: int
    unread_receipts: int
    after_receipt: int

    @property
    def is_good(self) -> bool:
        """Whether all promises were kept."""
        return not (self.lost or self.unread_receipts or self.after_receipt or self.over_limit)

    @property
    def over_limit(self) -> int:
        """By how much limits were exceeded."""
        return sum(max(0, most - LIMITS[which]) for which, most in self.busiest.items())


def judge(
    numbers: Collection[str], readers: Collection[str], lines: Sequence[Event], made: Sequence[Call] = ()
) -> Verdict:
    """Compare. `readers` are the notifications with a receipt; `lines` are in the order in which it all happened;
    `made` are the calls of the providers.

    Of what was not read, the AlimTalk must have been sent. A repeat is what a killed worker had sent and not settled.
    """
    calls = Counter((line.what, line.number) for line in lines)
    sent = Counter(what for what, _ in calls)
    repeated = Counter({what: sum(line.what == what for line in lines) - sent[what] for what in CHANNELS})
    processed: set[str] = set()
    after_receipt = 0
    for line in lines:
        if line.what == "READ":
            processed.add(line.number)
        else:
            after_receipt += line.number in processed
    return Verdict(
        sent=sent,
        repeated=repeated,
        receipts=len(processed),
        lost=sum(("AlimTalk", number) not in calls for number in set(numbers) - set(readers)),
        unread_receipts=len(set(readers) - processed),
        after_receipt=after_receipt,
        busiest=busiest(made),
    )


def busiest(calls: Sequence[Call]) -> dict[tuple[str, str], int]:
    """The most calls in the time of a limit, for each channel: of its provider, and to one user."""
    times = defaultdict[tuple[str, str], list[float]](list)
    for call in calls:
        times[call.channel, ""].append(call.at)
        times[call.channel, call.user].append(call.at)
    span, most = PER.total_seconds() - MARGIN, Counter[tuple[str, str]]()
    for (channel, user), all_of_it in times.items():
        moments = sorted(all_of_it)
        number = max(bisect_left(moments, at + span) - index for index, at in enumerate(moments))
        which = channel, "a user" if user else "all"
        most[which] = max(most[which], number)
    return dict(most)


def noon() -> str:
    """A time zone in which it is day, so that no quiet hours hold up the run."""
    return f"Etc/GMT{datetime.now(UTC).hour - 12:+d}"


def show(verdict: Verdict, notifications: int, kills: int) -> None:
    """Print the counts. Without receipts there would be an SMS and an AlimTalk for each notification."""
    print(f"notifications {notifications}, workers killed {kills} times")
    for channel in CHANNELS:
        sent = verdict.sent[channel]
        saved = "" if channel == "PUSH" else f", {notifications - sent} saved"
        print(f"{channel:<13} {sent}{saved}; sent again after a kill: {verdict.repeated[channel]}")
    print(f"receipts      {verdict.receipts}")
    for channel in CHANNELS:
        most, to_a_user = (verdict.busiest.get((channel, of), 0) for of in ("all", "a user"))
        limits = LIMITS[channel, "all"], LIMITS[channel, "a user"]
        print(f"{channel:<13} at most {most} calls a second, limit {limits[0]}; to a user {to_a_user}, {limits[1]}")
    for name, count in (
        ("neither read nor escalated to the end", verdict.lost),
        ("receipts that were not processed", verdict.unread_receipts),
        ("sent after the receipt was processed", verdict.after_receipt),
        ("calls over a limit", verdict.over_limit),
    ):
        print(f"{name}: {count} {'✗' if count else '✓'}")


class Run:
    """The course of a run: the web service, the users, and the one who kills workers."""

    def __init__(self, broker: Broker, folder: Path, notifications: int, kills: int) -> None:
        self._broker, self._notifications, self._kills = broker, notifications, kills
        self._log, self._errors, self._calls = (folder / name for name in ("sent.log", "workers.log", "calls.log"))
        self._environment = {**os.environ, "RSMQ_URL": broker.url, "RSMQ_PREFIX": broker.settings.prefix}
        self._environment |= {"CALLS": str(self._calls), "READ_WITHIN": "2"}
        self._headers = {"tenant": "airport", "tz": noon()}
        self._environment |= {"PYTHONUNBUFFERED": ""}  # buffered: a line is one write
        self._users: dict[str, str] = {}
        self._reads_from: dict[str, int] = {}
        self.readers: set[str] = set()
        self.killed = 0

    @property
    def numbers(self) -> Collection[str]:
        """The ids of the notifications."""
        return self._users.keys()

    def lines(self) -> list[Event]:
        """What has happened. All workers append to one file, so its order is the real one."""
        whole, _, _ = self._log.read_text().rpartition("\n")
        return [Event(*line.split()[:2]) for line in whole.splitlines()]

    def calls(self) -> list[Call]:
        """All calls of the providers."""
        return [Call(*line.split()[:2], float(line.split()[2])) for line in self._calls.read_text().splitlines()]

    async def perform(self) -> None:
        """Until every notification is read, or escalated to the end; or until nothing happens any more."""
        with self._workers() as workers:
            await self._all_serve()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._notify_all)
                tasks.start_soon(self._kill, workers)
                before, changed_at = 0, time.monotonic()
                while not self._is_done(lines := self.lines()) and time.monotonic() < changed_at + PATIENCE:
                    if len(lines) != before:
                        before, changed_at = len(lines), time.monotonic()
                    for line in lines:
                        self._deliver(line, tasks)
                    await anyio.sleep(POLL_SECONDS)
                tasks.cancel_scope.cancel()

    def _is_done(self, lines: Sequence[Event]) -> bool:
        ended = {line.number for line in lines if line.what == self._last(line.number)}
        return len(ended) == self._notifications and self.killed == self._kills

    def _last(self, number: str) -> str:
        """What is the end of a notification: its receipt if the user reads at all, else its AlimTalk."""
        return "AlimTalk" if self._reads_from.get(number) == NEVER else "READ"

    async def _notify_all(self) -> None:
        for number in range(self._notifications):
            at = number % USERS
            notification = Notification(user=f"{'guest' if at < GUESTS else 'user'}-{at}", text=f"gate {number}")
            ref = await self._broker.publish("push", notification, key=notification.user, headers=self._headers)
            self._users[ref], self._reads_from[ref] = notification.user, random.choice(READERS)
            await anyio.sleep(1 / PER_SECOND)

    def _deliver(self, line: Event, tasks: anyio.abc.TaskGroup) -> None:
        """Something reaches a phone: if its user reads there, a receipt comes after a while."""
        if line.what == "READ" or line.number in self.readers or line.number not in self._reads_from:
            return
        if CHANNELS.index(line.what) >= self._reads_from[line.number]:
            self.readers.add(line.number)
            tasks.start_soon(self._read, line.number)

    async def _read(self, number: str) -> None:
        await anyio.sleep(random.uniform(0, SLOWEST))
        receipt = {"user": self._users[number], "id": number}
        await self._broker.publish("receipts", receipt, key=receipt["user"], message_id=number)

    async def _kill(self, workers: list[subprocess.Popen[bytes]]) -> None:
        """Kill workers at random moments, spread over the run, and start others in their place."""
        for kill in range(self._kills):
            while len(self.lines()) < self._notifications * (kill + 0.5) / self._kills:
                await anyio.sleep(POLL_SECONDS)
            await anyio.sleep(random.uniform(0, 0.5))
            victim = random.randrange(WORKERS)
            workers[victim].kill()
            workers[victim].wait()
            self.killed += 1
            workers[victim] = self._start()
            await self._all_serve()

    async def _all_serve(self) -> None:
        """Wait until all workers are up, also the one in place of the last that was killed."""
        with anyio.fail_after(PATIENCE):
            while self._errors.read_text().count(" serves ") < WORKERS + self.killed:
                await anyio.sleep(POLL_SECONDS)

    @contextmanager
    def _workers(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Worker processes, which end with the block."""
        self._log.touch()
        running = [self._start() for _ in range(WORKERS)]
        try:
            yield running
        finally:
            for worker in running:
                worker.terminate()
            for worker in running:
                worker.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log, self._errors.open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "rsmq", "worker", "service:broker"], cwd=Path(__file__).parent,
                env=self._environment, stdout=log, stderr=errors,
            )  # fmt: skip


async def perform(folder: Path, notifications: int, kills: int, url: str | None) -> bool:
    """One run under a prefix of its own: print what came of it, and say whether that is right."""
    import orders  # now: it reads DATABASE_URL

    await orders.make_tables()
    await orders.engine.dispose()
    overrides = {} if url is None else {"url": url}
    async with Broker(Settings(**overrides, prefix=f"notifications-{secrets.token_hex(4)}")) as broker:
        run = Run(broker, folder, notifications, kills)
        await run.perform()
        for topic in ("push", "sms", "alimtalk", "unreached", "receipts"):
            if await broker.topics.find(topic):  # in a bad run it may never have been made
                await broker.topics.delete(topic)
    verdict = judge(run.numbers, run.readers, run.lines(), run.calls())
    show(verdict, notifications, run.killed)
    return verdict.is_good and len(run.numbers) == notifications


def main(
    notifications: Annotated[int, typer.Option(min=1, max=100_000, help="How many.")] = 200,
    kills: Annotated[int, typer.Option(min=0, max=1000, help="How many times a worker is killed.")] = 2,
    url: Annotated[str | None, typer.Option(help="The server. Default: RSMQ_URL, else an embedded one.")] = None,
) -> None:
    """Notify users and kill workers; ends with a verdict (exit code 1 if it is bad)."""
    logging.getLogger("rsmq").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(prefix="rsmq-notifications-"))
    os.environ["DATABASE_URL"] = f"sqlite+aiosqlite:///{folder / 'orders.db'}"
    if not anyio.run(perform, folder, notifications, kills, url):
        print(f"A promise was BROKEN: the logs are in {folder}")
        sys.exit(1)
    print("All were read or escalated to the end, nothing after its receipt was processed, and no limit exceeded.")
    shutil.rmtree(folder)


if __name__ == "__main__":
    typer.run(main)
