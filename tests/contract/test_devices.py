"""Promise 8: per device in strict order, at least once until acknowledged or expired, through failures."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from rsmq import Broker, Letter, Retry, Session, SessionTaken
from tests import forks
from tests.contract.inbox_process import TOPIC
from tests.contract.witness import dies, letters_of, patient
from tests.matrix.way import steady_connections
from tests.servers import wait_until

ROOT = Path(__file__).parents[2]
Start = Callable[..., forks.ForkedProcess]


@pytest.fixture
def start(server_url: str, prefix: str) -> Iterator[Start]:
    """Starts a producer or a feeding worker; all are ended after the test."""
    running: list[forks.ForkedProcess] = []

    def launch(*words: object) -> forks.ForkedProcess:
        args = (server_url, prefix, *map(str, words))
        running.append(forks.start("tests.contract.inbox_process", *args, cwd=ROOT, env=os.environ, stdout=2))
        return running[-1]

    yield launch
    for process in running:
        process.kill()
        process.wait()


@dataclass
class Note:
    """A record of a letter by a device that runs in its own process."""

    seq: int
    is_redelivered: bool
    payload: dict[str, Any]


class Phone:
    """A device that records which letter came in which session, and which acknowledgements were confirmed."""

    def __init__(self, brokers: list[Broker], name: str, start: Start, directory: Path) -> None:
        self._brokers, self.name, self._start, self._directory = brokers, name, start, directory
        self.confirmed: dict[int, tuple[str, int]] = {}
        self.order: list[tuple[str, int]] = []
        self.known: set[int] = set()
        self.again = 0

    async def connect(self, connection: int, letters: int) -> None:
        """One connection, which reads so many letters and ends in one of five ways."""
        way = ("clean", "unacknowledged", "taken", "dropped", "killed")[connection % 5]
        if way == "killed":
            await self.be_killed(connection, min(letters, 200))
            return
        async with AsyncExitStack() as stack:
            window = random.choice([1, 7, 100])
            session = await stack.enter_async_context(self._brokers[connection % 2].connect(self.name, window=window))
            pending = await self.read(session, letters, is_silent=way == "unacknowledged")
            if way == "dropped":
                stack.pop_all()  # it is not closed: its acknowledgements are never confirmed
            elif way == "taken":
                async with self._brokers[(connection + 1) % 2].connect(self.name):
                    with pytest.raises(SessionTaken):
                        await exhaust(session)
            else:
                await session.flush()
                self.confirmed |= pending

    async def read(self, session: Session, letters: int, *, is_silent: bool) -> dict[int, tuple[str, int]]:
        """Read, acknowledge (a silent one now and then does not); returns what is not yet confirmed."""
        last, kept, pending = 0, 0, dict[int, tuple[str, int]]()
        for _ in range(letters):
            letter = await anext(session)
            self.note(letter, last)
            last = letter.seq
            if is_silent and kept < session.window - 1 and random.random() < 0.05:
                kept += 1
                continue
            pending[letter.seq] = (letter.payload["by"], letter.payload["n"])
            await session.ack(letter)
            if random.random() < 0.05:
                await session.flush()
                self.confirmed |= pending
                pending.clear()
        return pending

    async def be_killed(self, connection: int, letters: int) -> None:
        """The device is a process, and ends by SIGKILL while letters come in; then its ledger is read."""
        ledger = self._directory / f"ledger-{connection}"
        process = self._start("listen", self.name, ledger)

        def notes() -> list[str]:
            return ledger.read_text().splitlines() if ledger.exists() else []

        await anyio.to_thread.run_sync(wait_until, lambda: len(notes()) >= letters, "the device has read")
        process.kill()
        process.wait()
        last, pending = 0, dict[int, tuple[str, int]]()
        for line in notes():
            if line == "confirmed":
                self.confirmed |= pending
                pending.clear()
                continue
            seq, is_redelivered, by, n = line.split()
            note = Note(int(seq), is_redelivered == "1", {"by": by, "n": int(n)})
            self.note(note, last)
            last, pending[note.seq] = note.seq, (by, note.payload["n"])

    def note(self, letter: Letter | Note, last: int) -> None:
        """What one connection must look like, letter by letter."""
        assert letter.seq > last, f"OutOfOrder: {letter} after {last}"
        assert letter.seq not in self.confirmed, f"MoreThanOnce: {letter} was acknowledged"
        if letter.seq in self.known:
            assert letter.is_redelivered, f"{letter} was out before and does not say so"
            self.again += 1
        else:
            self.known.add(letter.seq)
            self.order.append((letter.payload["by"], letter.payload["n"]))


async def exhaust(session: Session) -> None:
    """Repeat until it raises."""
    while True:
        await session.flush()
        await anext(session)


@steady_connections
async def test_a_device_that_comes_and_goes(
    make_broker: Callable[..., Broker], start: Start, tmp_path: Path, prefix: str
) -> None:
    """Twenty connections at random under 20 000 messages of four producers, two producers and a worker killed: all
    arrive, in the order of each producer, and none again after its acknowledgement was confirmed."""
    names, each = ("a", "b", "c", "d"), 5000
    feeds = [start("feed"), start("feed")]

    def produce(name: str) -> forks.ForkedProcess:
        return start("produce", "phone", name, each, tmp_path / name)

    producers = {name: produce(name) for name in names}
    brokers = [make_broker(), make_broker()]
    async with brokers[0], brokers[1]:
        phone = Phone(brokers, "phone", start, tmp_path)
        for connection in range(20):
            await phone.connect(connection, random.randrange(1, 900))
            if connection in (3, 6):
                victim = names[connection % 4]
                producers[victim].kill()
                producers[victim].wait()
                producers[victim] = produce(victim)
            if connection == 9:
                feeds[0].kill()
                feeds.append(start("feed"))
        async with brokers[0].connect("phone", auto_ack=True) as session:
            last = 0
            with anyio.move_on_after(60):
                while len(phone.order) < each * len(names):
                    letter = await anext(session)
                    phone.note(letter, last)
                    last = letter.seq
        for name in names:
            assert [n for by, n in phone.order if by == name] == list(range(each)), f"the order of {name}"
        assert producers["a"].wait(60) == 0
        device = await patient(brokers[0].devices.find)("phone")
        assert device is not None
        assert (device.backlog, device.dropped, device.expired) == (0, 0, 0)
        assert device.seq == each * len(names), "nothing was stored twice"


async def test_backlog_and_live_letters_do_not_race(broker: Broker) -> None:
    """A message sent while the device reconnects is delivered after the backlog, and not lost."""
    async with broker:
        await broker.send_many(("phone", n) for n in range(500))
        got: list[int] = []

        async def send() -> None:
            for n in range(500, 1500):
                await broker.send("phone", n)

        async with anyio.create_task_group() as tasks, broker.connect("phone", window=20, auto_ack=True) as session:
            tasks.start_soon(send)
            async for letter in session:
                got.append(letter.payload)
                if len(got) == 1500:
                    break
        assert got == list(range(1500))


async def test_a_feed_stores_each_message_once(make_broker: Callable[..., Broker]) -> None:
    """A recipient function that fails for a while delays its partition, loses nothing, reorders nothing, repeats
    nothing; a reset of the group repeats nothing either."""
    broker, failed = make_broker(), set[int]()

    def to(alert: dict[str, int]) -> list[str]:
        if alert["n"] % 100 == 50 and alert["n"] not in failed:
            failed.add(alert["n"])
            raise Retry(after=timedelta(milliseconds=20))
        return ["phone", f"phone-{alert['n'] % 3}"]

    broker.deliver(TOPIC, to=to, partitions=2)
    async with broker.running():
        await broker.publish_many(TOPIC, [{"n": n} for n in range(1000)], key=lambda alert: "k")
        await expect(broker, "phone", list(range(1000)))
        await patient(broker.reset_group)(TOPIC, "devices")
        await broker.publish(TOPIC, {"n": 1000}, key="k")
        await expect(broker, "phone", [1000])
        await expect(broker, "phone-0", list(range(0, 1000, 3)))
    assert failed == set(range(50, 1000, 100))


async def expect(broker: Broker, device: str, numbers: list[int]) -> None:
    """Assert that the device gets exactly these letters next."""
    async with broker.connect(device, auto_ack=True) as session:
        with anyio.fail_after(30):
            assert [(await anext(session)).payload["n"] for _ in numbers] == numbers


async def test_a_wrong_recipient_is_a_dead_letter(make_broker: Callable[..., Broker]) -> None:
    """An invalid device id becomes a dead letter and does not affect other messages."""
    broker = make_broker()
    broker.deliver(TOPIC, to=lambda alert: alert["to"], partitions=1)
    async with broker.running():
        await broker.publish_many(TOPIC, [{"to": "x" * 300, "n": 0}, {"to": ["phone", "phone"], "n": 1}, {"to": 7}])
        await expect(broker, "phone", [1])
        await dies(broker, TOPIC, "devices", 1)
        assert "use at most 256" in (await letters_of(broker, TOPIC, "devices"))[0].error


async def test_inboxes_are_bounded(make_broker: Callable[..., Broker]) -> None:
    """Above the limit the oldest letters are dropped and counted."""
    async with make_broker(inbox_limit=10) as broker:
        await broker.send_many(("phone", {"n": n}) for n in range(25))
        await expect(broker, "phone", list(range(15, 25)))
        device = await patient(broker.devices.find)("phone")
        assert device is not None
        assert (device.dropped, device.backlog) == (15, 0)


async def test_the_server_restarts_under_a_session(tmp_path: Path) -> None:
    """A session and its senders survive the restart of a killed server with its data."""
    from tests.servers import Server

    with Server(aof=True) as server:
        async with Broker(url=server.url, preflight="warn") as broker, broker.connect("phone") as session:
            await broker.send("phone", {"n": 0})
            await session.ack(await anext(session))
            await session.flush()
            await anyio.to_thread.run_sync(lambda: wait_until(lambda: server.client().ping(), "alive"))
            with server.client() as plain:
                plain.execute_command("CONFIG", "SET", "appendfsync", "always")
                plain.execute_command("BGREWRITEAOF")
                wait_until(lambda: not plain.info("persistence")["aof_rewrite_in_progress"], "the log is written")
            await anyio.to_thread.run_sync(server.restart)
            await broker.send("phone", {"n": 1})
            with anyio.fail_after(30):
                letter = await anext(session)
            assert (letter.seq, letter.payload) == (2, {"n": 1})
