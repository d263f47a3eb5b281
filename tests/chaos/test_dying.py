"""SIGKILL at any step of cancelling through an outbox, and of erasing a key."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from rsmq import Broker, Settings
from rsmq.control import Erased
from rsmq.model.packing import unpack_fields
from rsmq.sql import Outbox, create_tables
from tests import forks
from tests.chaos.scenario_run import IS_LONG
from tests.contract.witness import Witness, ask, letters_of, settled
from tests.control.erased import holds, sender
from tests.patience import until
from tests.sql.test_outbox import is_empty

ROOT = Path(__file__).parents[2]
KILLS = 8 if IS_LONG else 2
pytestmark = pytest.mark.chaos


class Processes:
    """Starts processes that end at a step, and ends those that are left."""

    def __init__(self, settings: Settings, seed: int, log: Path) -> None:
        self._settings, self.random, self._log = settings, Random(seed), log
        self._started = list[forks.ForkedProcess]()

    def start(self, what: str, *more: str, last: int = 0) -> forks.ForkedProcess:
        """One that does this, and ends at a step up to `last`; 0: it goes on."""
        step, when = (self.random.randint(1, last) if last else 0), self.random.choice(["before", "after"])
        about = (what, str(step), when, str(self._settings.url), self._settings.prefix, *more)
        with self._log.open("ab") as log:
            self._started.append(forks.start("tests.chaos.dying_process", *about, cwd=ROOT, env=os.environ, stdout=log))
        return self._started[-1]

    async def end_of(self, process: forks.ForkedProcess) -> int | None:
        """Its exit code, when it has ended."""
        await until(lambda: process.poll() is not None, "it has ended")
        return process.returncode

    def end(self) -> None:
        """Kill those that run."""
        for each in self._started:
            each.kill()
            each.wait()


@pytest.fixture
def processes(settings: Settings, seed: int, tmp_path: Path) -> Iterator[Processes]:
    """Of one test."""
    found = Processes(settings, seed, tmp_path / "log")
    yield found
    found.end()


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """With two partitions."""
    return Broker(replace(settings, preflight="warn", partitions=2, lease_ttl=timedelta(seconds=1)))


class Rows:
    """Rows of an outbox, numbered: some with an id, a unique name or a delay of an hour, some cancelled."""

    def __init__(self, engine: AsyncEngine, prefix: str, random: Random) -> None:
        self._engine, self.outbox, self._random = engine, Outbox(engine, prefix=prefix), random
        self._count = 0
        self._open: dict[int, str] = {}
        self.delayed, self.cancelled = set[int](), set[int]()

    async def write(self, count: int) -> None:
        """Publish so many, each in a transaction of its own, and cancel some of all."""
        for n in range(self._count, self._count + count):
            options = self._random.choice([{}, {"message_id": f"m{n}"}, {"unique": f"u{n}"}])
            if self._random.random() < 0.5:
                options = {**options, "delay": "1h"}
                self.delayed.add(n)
            async with self._engine.begin() as connection:
                self._open[n] = await self.outbox.publish(connection, "orders", n, key=self.key(n), **options)
            if self._random.random() < 0.4:
                chosen = self._random.choice(sorted(self._open))
                async with self._engine.begin() as connection:
                    await self.outbox.cancel(connection, self._open.pop(chosen), "orders", key=self.key(chosen))
                self.cancelled.add(chosen)
        self._count += count

    @staticmethod
    def key(n: int) -> str:
        """One of three."""
        return f"k{n % 3}"

    @property
    def wanted(self) -> set[int]:
        """Those that no row cancels."""
        return set(range(self._count)) - self.cancelled


async def test_relay_that_is_killed_at_any_step_sends_and_cancels_each_row(
    broker: Broker, processes: Processes, witness: Witness, tmp_path: Path
) -> None:
    """What a row cancels is never handled, and what none cancels is stored once and handled in order."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}"
    engine = create_async_engine(url)
    rows = Rows(engine, broker.keys.prefix, processes.random)

    @broker.handler("orders", group="billing")
    async def bill(n: int) -> None:
        witness.note(n)

    async with engine.begin() as connection:
        await connection.run_sync(create_tables)
    async with broker.running():
        pass  # the group is there, and nothing handles what is relayed
    for _ in range(KILLS):
        await rows.write(30)
        code = await processes.end_of(processes.start("relay", url, last=60))
        assert code == -signal.SIGKILL, (tmp_path / "log").read_text()
    await rows.write(10)
    processes.start("relay", url)
    await until(lambda: is_empty(rows.outbox), "all rows are relayed")
    async with broker.running():
        await settled(broker, "orders")
        delayed = Counter[int]()
        for partition in range(2):
            for packed in await ask(broker, "ZRANGE", broker.keys.delayed("orders", partition), 0, -1):
                flat = unpack_fields(packed)
                delayed[int(dict(zip(flat[::2], flat[1::2], strict=True))[b"data"])] += 1
    assert delayed == Counter(rows.wanted & rows.delayed)
    assert Counter(witness.seen) == Counter(rows.wanted - rows.delayed)
    for key in range(3):
        of_key = [n for n in witness.seen if n % 3 == key]
        assert of_key == sorted(of_key)
    await engine.dispose()


async def test_erase_that_is_killed_at_any_step_is_completed_by_the_next_one(
    broker: Broker, processes: Processes
) -> None:
    """With workers that are killed, too. What has another key stays as it was."""
    sender(broker)
    worker = processes.start("handle")
    async with broker:
        for key in ("ada", "bob"):
            for what in ("settled", "dead", "parked", "behind", "slow"):
                await broker.publish("push", f"gate 7, {what} {key}", key=key)
            await broker.publish("push", f"gate 7, delayed {key}", key=key, delay="1h")
            await broker.publish("push", f"gate 7, named {key}", key=key, delay="1h", unique=key, until="2h")
        await until(lambda: has_letters(broker, 2), "two are dead")
        for _ in range(KILLS):
            for n in range(5):
                await broker.publish("push", f"gate 7, again {n} ada", key="ada")
            erasing = processes.start("erase", "ada", last=40)
            if processes.random.random() < 0.5:
                worker.kill()
                worker = processes.start("handle")
            await processes.end_of(erasing)
        erased = await broker.erase("ada", timeout="20s")
        assert erased.running == 0
        assert await holds(broker, " ada") == []
        assert await broker.erase("ada") == Erased()
        (letter,) = await letters_of(broker, "push", "sender")
        assert letter.key == "bob"
        found = Counter[str]()
        for name in await holds(broker, " bob"):
            found[name.partition("}")[2]] += 1
        assert found[":delayed"] == found[":sender:dlq"] == 1
        status = [await ask(broker, "ZCARD", broker.keys.delayed("push", n)) for n in range(2)]
        assert sum(status) == 2


async def has_letters(broker: Broker, count: int) -> bool:
    """Whether so many messages are dead."""
    return await broker.dead_letters.count(await broker.topics.existing("push"), "sender") == count
