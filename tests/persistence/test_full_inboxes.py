"""Back-pressure: writers whose letters wait for room, played with many seeds on a real server in virtual time."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis

from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.persistence.inbox_writer import GIVEN_UP, RETRY, InboxWriter, Receipt, WaitForRoom
from rsmq.persistence.letter import Letter, pack_letter, seal
from rsmq.redis.client.script_batcher import Call
from rsmq.redis.scripts import ACK_LETTERS, ADD_LETTERS, CLOSE_SESSION, OPEN_SESSION, PAGE_LETTERS

PATIENCE = 10.0
LIFE = 86_400_000
SEEDS = 60


class VirtualSelector(selectors.SelectSelector):
    """Each wait is over at once: the time of its loop goes on at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1e6
        """As on a machine that has run for eleven days: a time of 0.0 is long ago."""

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time goes on only when nothing is ready."""

    def __init__(self) -> None:
        self._clock = VirtualSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class DirectBatcher:
    """Runs each call at once on the server. Some replies get lost, and their calls are repeated."""

    def __init__(self, client: redis.Redis, chance: random.Random) -> None:
        client.execute_command("SCRIPT", "LOAD", ADD_LETTERS.source)
        assert client.connection is not None, "it has one connection"
        self._connection = client.connection
        self._chance = chance

    def add(self, call: Call) -> None:
        """As the batcher does; the reply comes in a later turn of the loop."""
        delay = self._chance.choice([0.0, 0.001, 0.05])
        asyncio.get_running_loop().call_later(delay, self._run, call)

    def _run(self, call: Call) -> None:
        while True:
            self._connection.send_packed_command([call.packed])
            reply = self._connection.read_response()
            if self._chance.random() > 0.05:
                break
        call.done(reply)


@dataclass
class Reader:
    """A client that is connected. It takes up to `window` letters at a time, with `pauses` between."""

    name: str
    keys: Keys
    client: redis.Redis
    window: int
    pauses: tuple[float, ...]
    got: list[str] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    cursor: int = 0
    epoch: str = ""

    def connect(self) -> None:
        args = ("gateway", 0, LIFE, "source:!g", f"{1:016d}", LIFE)
        self.epoch = OPEN_SESSION.run(self.client, self.keys.device(self.name), args)[1].decode()
        self.client.execute_command("HSET", self.keys.session(self.name), "mqtt", 3600)

    def take(self) -> int:
        """Read and acknowledge; returns how many letters there were."""
        names = self.keys.device(self.name)[:3]
        reply = PAGE_LETTERS.run(self.client, names, (self.epoch, self.cursor, self.window, 1 << 20, LIFE))
        assert reply[0] == b"OK"
        self.cursor = int(reply[1])
        seqs = [int(each) for each in reply[3::2]]
        self.got += [Letter(seq, each).payload for seq, each in zip(seqs, reply[4::2], strict=True)]
        self.seqs += seqs
        if seqs:
            assert ACK_LETTERS.run(self.client, names, (self.epoch, *seqs))[0] == b"OK"
        return len(seqs)

    def counted(self, name: str) -> int:
        """A counter of its session."""
        return int(self.client.execute_command("HGET", self.keys.session(self.name), name) or 0)

    def waiting(self) -> int:
        return int(self.client.execute_command("ZCARD", self.keys.inbox(self.name)))


class Play:
    """One seed: writers with small inboxes, and what they must not do."""

    def __init__(self, seed: int, client: redis.Redis, keys: Keys, limits: tuple[int, ...] = (1, 2, 3, 7, 30)) -> None:
        self.chance, self.client, self.keys = random.Random(seed), client, keys
        self.limit = self.chance.choice(limits)
        self.dropped = 0
        settings = Settings(inbox_limit=self.limit)
        batcher: Any = DirectBatcher(client, self.chance)
        self.writers = [
            InboxWriter(batcher, keys, settings, is_cluster=self.chance.random() < 0.3)
            for _ in range(self.chance.choice([1, 1, 2]))
        ]
        for each in self.writers:
            each.wait_for_readers(PATIENCE, self._drop)
        self.readers = list[Reader]()

    def _drop(self, count: int) -> None:
        self.dropped += count

    def reader(self, name: str, *, window: int = 100, pauses: tuple[float, ...] = (0.02,)) -> Reader:
        made = Reader(name, self.keys, self.client, window, pauses)
        made.connect()
        self.readers.append(made)
        return made

    async def write(self, source: str, number: int, names: tuple[str, ...], first: int = 1) -> None:
        """Letters of one partition, in bursts, each as its router does: the next one after the last is stored."""
        writer, at = self.writers[number % len(self.writers)], first
        for size in self.bursts:
            receipt = Receipt()
            for position in range(at, at + size):
                text = seal(f"{source} {position}".encode(), "text/plain")
                writer.put(names, f"source:&{source}", pack_letter(f"{position:016d}", "", "", text), receipt)
            at += size
            await receipt.complete()

    bursts: tuple[int, ...] = ()

    async def read(self, reader: Reader, is_over: asyncio.Event) -> None:
        """Until everything is written and read."""
        while not is_over.is_set() or reader.waiting():
            await asyncio.sleep(self.chance.choice(reader.pauses))
            reader.take()


@pytest.fixture(scope="module")
def plain(server_url: str) -> Iterator[redis.Redis]:
    """A blocking client with raw replies."""
    with redis.Redis.from_url(server_url, protocol=2, single_connection_client=True) as client:
        client.response_callbacks.clear()
        yield client


def in_order(got: list[str]) -> Mapping[str, list[int]]:
    """The positions of each source, as they came."""
    found: dict[str, list[int]] = {}
    for each in got:
        source, _, position = each.partition(" ")
        found.setdefault(source, []).append(int(position))
    return found


async def fast_and_slow(seed: int, plain: redis.Redis, keys: Keys) -> None:
    play = Play(seed, plain, keys)
    chance = play.chance
    slow = (0.02, RETRY, 1.0) if play.limit > 3 else (0.03, RETRY)
    for number in range(chance.choice([1, 1, 2, 4])):
        pauses = chance.choice([(0.02,), slow, (PATIENCE / 2,) if play.limit == 30 else slow])
        play.reader(f"phone-{number}", window=chance.choice([1, 3, 100]) if play.limit > 3 else 100, pauses=pauses)
    names = tuple(each.name for each in play.readers)
    play.bursts = tuple(
        chance.choice([1, play.limit, 50, 130 if play.limit < 7 else 400]) for _ in range(chance.choice([1, 2, 3]))
    )
    is_over = asyncio.Event()
    reading = [asyncio.ensure_future(play.read(each, is_over)) for each in play.readers]
    count = chance.choice([1, 1, 2, 3])
    await asyncio.gather(*(play.write(f"t.{number}", number, names) for number in range(count)))
    is_over.set()
    await asyncio.gather(*reading)
    expected = {f"t.{number}": list(range(1, sum(play.bursts) + 1)) for number in range(count)}
    for each in play.readers:
        assert in_order(each.got) == expected, f"seed {seed}: {each.name} with limit {play.limit}"
        assert each.counted("dropped") == 0
        assert each.seqs == sorted(each.seqs)
    assert play.dropped == 0


def test_clients_that_take_letters_lose_none_whatever_the_limit_and_the_batch(plain: redis.Redis, prefix: str) -> None:
    """Also where each try finds the inbox empty, where others fill the room first, and where replies get lost."""
    for seed in range(SEEDS):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(fast_and_slow(seed, plain, Keys(f"{prefix}.{seed}")))


async def stuck_and_back(seed: int, plain: redis.Redis, keys: Keys) -> None:
    play = Play(seed, plain, keys, (7, 30))
    loop, chance = asyncio.get_running_loop(), play.chance
    stuck, other = play.reader("stuck"), play.reader("other", pauses=(0.02,))
    count = chance.choice([1, 2, 3])
    play.bursts = (play.limit, *(chance.choice([1, play.limit, 60]) for _ in range(4)))
    is_over = asyncio.Event()
    reading = asyncio.ensure_future(play.read(other, is_over))
    started = loop.time()
    await asyncio.gather(*(play.write(f"t.{number}", number, (stuck.name, other.name)) for number in range(count)))
    took = loop.time() - started
    # each process waits once; the other client needs up to a try for each seven letters
    most = len(play.writers) * PATIENCE + 2 + RETRY * count * sum(play.bursts) / 7
    assert took < most, f"seed {seed}: writers waited for {took:g} s"
    total = count * sum(play.bursts)
    assert stuck.waiting() == play.limit
    assert stuck.counted("dropped") == total - play.limit
    assert play.dropped <= total - play.limit  # fewer if a reply got lost
    # it takes letters again: from now on it is waited for, within the time in which it was given up, too
    before = stuck.counted("dropped")
    assert stuck.take() == play.limit
    first, play.bursts = sum(play.bursts) + 1, (play.limit + 1, 3 * play.limit + 100)
    assert loop.time() - started < PATIENCE * 3 + GIVEN_UP
    again = asyncio.ensure_future(play.read(stuck, is_over))
    await asyncio.gather(*(play.write(f"t.{n}", n, (stuck.name, other.name), first) for n in range(count)))
    is_over.set()
    await asyncio.gather(reading, again)
    assert stuck.counted("dropped") == before, f"seed {seed}: it takes letters again, and they are dropped"
    assert in_order(other.got) == {f"t.{n}": list(range(1, first + sum(play.bursts))) for n in range(count)}
    for positions in in_order(stuck.got).values():
        assert positions == sorted(set(positions))
        assert positions[-sum(play.bursts) :] == list(range(first, first + sum(play.bursts)))


def test_a_client_that_takes_none_is_given_up_once_and_waited_for_when_it_takes_letters_again(
    plain: redis.Redis, prefix: str
) -> None:
    """Its letters above the limit are dropped, the oldest first and counted, and no other client loses one."""
    for seed in range(SEEDS // 2):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(stuck_and_back(seed, plain, Keys(f"{prefix}.{seed}")))


async def leaves(seed: int, plain: redis.Redis, keys: Keys) -> None:
    play = Play(seed, plain, keys)
    reader = play.reader("phone")
    play.bursts = (play.limit + 50,)
    writing = asyncio.ensure_future(play.write("t.0", 0, (reader.name,)))
    await asyncio.sleep(PATIENCE / 2)
    assert not writing.done()
    assert CLOSE_SESSION.run(plain, (keys.session(reader.name),), (reader.epoch,)) == b"OK"
    await asyncio.wait_for(writing, 1.0)
    assert (reader.waiting(), reader.counted("dropped")) == (play.limit, 50)


def test_an_inbox_whose_client_leaves_is_not_waited_for_any_longer(plain: redis.Redis, prefix: str) -> None:
    """The oldest letters of a client that is away are dropped at once."""
    for seed in range(10):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(leaves(seed, plain, Keys(f"{prefix}.{seed}")))


def test_a_wait_starts_anew_with_what_has_room_and_with_what_is_taken_only() -> None:
    """An inbox that is empty at each try, one that others fill, and one that no reader empties."""
    wait = WaitForRoom(100.0, 7)
    assert wait.after(200.0, 30, 7) == WaitForRoom(200.0, 7)
    assert wait.after(200.0, 0, 8) == WaitForRoom(200.0, 8)
    assert wait.after(200.0, 0, 7) is wait
    assert wait.after(200.0, 0, 3) is wait  # after a failover, say
