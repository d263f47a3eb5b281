"""Raw entries, one by one and in batches: the same order and the same outcomes as with messages."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any

import anyio
import pytest

from rsmq.consumer.running.execution import build_payload_call, build_runner
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.limits import ConcurrencyLimit, KeyRate, RateLimit
from rsmq.consumer.waiting.queue import Queue
from rsmq.consumer.waiting.raw_entries import RawEntries, key_of, make_messages
from rsmq.errors import StaleEpoch
from rsmq.handler.first_step import Continuation
from rsmq.handler.handler import build_handler
from rsmq.handler.middleware import Payloads, Wrapping
from rsmq.handler.rate_limit import Rate
from rsmq.handler.retry import Reject
from rsmq.model.clock import ServerClock
from rsmq.model.message import LARGEST_PAYLOAD, Message, RawEntry, plain_size
from tests.consumer.test_queue import make_lane


def plain(number: int, key: int | None, data: bytes | None = None) -> RawEntry:
    """An entry as our own publisher lays it out."""
    payload = b'{"n":%d,"k":%d}' % (number, key or 0) if data is None else data
    entry = [b"data", payload, b"id", b"m%d" % number]
    return b"%d-0" % number, entry if key is None else [*entry, b"key", b"%d" % key]


def with_headers(entry: RawEntry) -> RawEntry:
    """The same with headers: it is not plain."""
    return entry[0], [*entry[1], b"h", b'{"tenant":"a"}']


def made_of(lane: Lane, rows: list[RawEntry]) -> dict[int, Message]:
    """The messages that the fetcher makes of what is not plain."""
    made = make_messages(lane, rows, plain_size(rows)[1])
    assert made is not None
    return made


class Books:
    """Stands in for the settler: notes what became of each message."""

    def __init__(self) -> None:
        self.dirty: list[Lane] = []
        self.buried: list[bytes] = []
        self.clock = ServerClock()
        self.fallbacks = self
        self.notes = self
        self.wants_results = False

    def check_by(self, _runs: Any) -> None:
        """There are no steps."""

    def keep_failure(self, _message: Message, _lane: Lane, _reason: str, _error: str) -> None:
        """There is no result."""

    async def keep(self, _message: Message, _lane: Lane, decision: Any, _attempts: int) -> Any:
        """There is no fallback topic."""
        return decision

    def add_done(self, lane: Lane, entry_ids: list[bytes]) -> None:
        """Something is done."""
        self.dirty.append(lane)
        lane.done += entry_ids

    async def bury(self, _lane: Lane, entry_id: bytes, _attempts: int, _decision: Any) -> bool:
        """A dead letter."""
        await asyncio.sleep(0)
        self.buried.append(entry_id)
        return True

    async def charge(self, _message: Message, _lane: Lane) -> tuple[bytes | None, timedelta]:
        """A redelivered message is not ours any more."""
        await asyncio.sleep(0)
        return None, timedelta(0)


class Bench:
    """A runner for one handler, fed by hand."""

    def __init__(
        self, function: Callable[..., Any], *, batch: int | None, ordering: Any = "key", **options: Any
    ) -> None:
        handler = build_handler(function, "topic", group="group", batch=batch, ordering=ordering, **options)
        self.queue = Queue(is_ordered=ordering != "none", is_serial=ordering == "partition")
        self.books = Books()
        self.runner = build_runner(handler, (), self.queue, self.books, Counter())  # type: ignore[arg-type]
        for rate in handler.rates:
            if rate.by == "key":
                self.queue.message_rate = KeyRate(rate, self.books.clock, self._let_go)
            else:
                self.queue.rate_limit = RateLimit(rate, lambda: 1, self.runner.wake_soon)
        if handler.group_concurrency is not None:
            self.queue.group_limit = ConcurrencyLimit(lambda: 2)
        self.lanes = [make_lane(number) for number in range(3)]

    def _let_go(self, message: Message, lane: Lane) -> None:
        self.queue.let_go(message, lane)
        self.runner.wake_soon()

    async def feed(self, chunks: list[tuple[int, list[RawEntry]]]) -> None:
        """Offer what was read, chunk by chunk, and let the pool work."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.runner.run)
            for number, rows in chunks:
                lane = self.lanes[number]
                if not self.queue.offer_raw(lane, rows, made_of(lane, rows)):
                    self.queue.offer(lane, [Message(lane, entry_id, entry) for entry_id, entry in rows])
                await self.runner.wake()
            while self.queue.in_flight or self.queue.held:
                await self.runner.wake()
                await asyncio.sleep(0)
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("ordering", ["key", "partition", "none"])
@pytest.mark.parametrize("seed", range(20))
async def test_raw_batches_keep_order_and_settle_every_message_once(seed: int, ordering: str) -> None:
    """Whether a handler returns at once, suspends, fails or returns outcomes: every message of a key in order, one at
    a time, each settled or buried once, and nothing is left behind."""
    random, seen, busy = Random(seed), defaultdict[Any, list[int]](list), set[Any]()

    async def handle(payloads: list[dict[str, Any]]) -> Any:
        orders = {order_of(each) for each in payloads}
        assert not busy & orders
        for each in payloads:
            seen[order_of(each)].append(each["n"])
        choice = random.randrange(6)
        busy.update(orders)
        for _ in range(choice % 3):
            await asyncio.sleep(0)
        busy.difference_update(orders)
        if choice == 4:
            raise Reject("all")
        return [Reject("one") if random.randrange(3) == 0 else None for _ in payloads] if choice == 5 else None

    def order_of(payload: dict[str, Any]) -> Any:
        if ordering == "none":
            return ("each", payload["n"])
        return (
            ("lane", payload["n"] % 3) if ordering == "partition" else (payload["n"] % 3, payload["k"] or payload["n"])
        )

    bench = Bench(handle, batch=random.choice([1, 3, 7, 50]), ordering=ordering, concurrency=random.choice([1, 2, 8]))
    chunks, count = list[tuple[int, list[RawEntry]]](), 0
    for _ in range(30):
        lane, rows = random.randrange(3), list[RawEntry]()
        for _ in range(random.randrange(1, 12)):
            row = plain(count * 3 + lane, random.choice([None, 1, 2, 3]))
            rows.append(with_headers(row) if random.random() < 0.1 else row)
            count += 1
        chunks.append((lane, rows))
    await bench.feed(chunks)

    done = [entry_id for lane in bench.lanes for entry_id in lane.done] + bench.books.buried
    assert sorted(done) == sorted(entry_id for _, rows in chunks for entry_id, _ in rows)
    assert all(numbers == sorted(numbers) for numbers in seen.values())
    assert [(bench.runner.running_of(lane), lane.flows.raw_entries, lane.flows.waiting) for lane in bench.lanes] == [
        (0, 0, {})
    ] * 3
    assert (bench.queue.in_flight, bench.queue.blocked, list(bench.queue.ready)) == (0, 0, [])


LIMITS: dict[str, dict[str, Any]] = {
    "free": {},
    "rate": {"rate": Rate(5, per=timedelta(milliseconds=1))},
    "rate by key": {"rate": Rate(2, per=timedelta(milliseconds=2), by="key")},
    "at once": {"group_concurrency": 2},
}


@pytest.mark.parametrize(
    ("ordering", "limit"),
    [("key", "free"), ("partition", "free"), ("none", "free"), ("key", "rate"), ("none", "rate"),
     ("key", "rate by key"), ("key", "at once")],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(15))
async def test_single_calls_of_raw_entries_keep_order_and_settle_every_message_once(
    seed: int, ordering: str, limit: str
) -> None:
    """Whether a call returns at once, suspends, fails or cancels its own task, under a limit or not: every message of a
    key in order, one at a time, each settled or buried once, and no call suffers from another."""
    random, seen, busy = Random(seed), defaultdict[Any, list[int]](list), set[Any]()
    rejected, usual = set[bytes](), random.choice([0, 0, 1])

    async def handle(payload: dict[str, Any]) -> Any:
        number = payload["n"]
        order = {"none": ("each", number), "partition": ("lane", number % 3)}.get(
            ordering, (number % 3, payload["k"] or ("each", number))
        )
        assert order not in busy
        seen[order].append(number)
        busy.add(order)
        choice = random.randrange(12)
        for _ in range(choice if 0 < choice < 4 else usual):
            await asyncio.sleep(0)
        busy.remove(order)
        task = asyncio.current_task()
        assert task is not None
        if choice == 4:
            rejected.add(b"%d-0" % number)
            raise Reject("this one")
        if choice == 5:
            task.cancel()  # its message is done all the same, and the next call is not cancelled
        return choice if choice == 6 else None

    bench = Bench(handle, batch=None, ordering=ordering, concurrency=random.choice([1, 2, 8]), **LIMITS[limit])
    assert bench.queue.takes_raw
    chunks, count = list[tuple[int, list[RawEntry]]](), 0
    for _ in range(30):
        lane, rows = random.randrange(3), list[RawEntry]()
        for _ in range(random.randrange(1, 12)):
            row = plain(count * 3 + lane, random.choice([None, 1, 2, 3]))
            rows.append(with_headers(row) if random.random() < 0.1 else row)
            count += 1
        chunks.append((lane, rows))
    await bench.feed(chunks)

    done = [entry_id for lane in bench.lanes for entry_id in lane.done]
    assert set(bench.books.buried) == rejected
    assert sorted(done + bench.books.buried) == sorted(entry_id for _, rows in chunks for entry_id, _ in rows)
    assert all(numbers == sorted(numbers) for numbers in seen.values())
    assert [(bench.runner.running_of(lane), lane.flows.raw_entries, lane.flows.waiting) for lane in bench.lanes] == [
        (0, 0, {})
    ] * 3
    assert (bench.queue.in_flight, bench.queue.blocked, list(bench.queue.ready)) == (0, 0, [])


async def test_single_call_of_a_raw_entry_shows_its_message_to_other_threads() -> None:
    """What blocks the event loop is named by the message that runs, although none was made for it."""
    shown = list[str]()

    async def handle(_payload: dict[str, Any]) -> None:
        (task_slot,) = bench.runner.task_slots
        assert len(task_slot.messages) == 1
        assert task_slot.started > 0
        shown.extend(message.id for message in task_slot.messages)

    bench = Bench(handle, batch=None)
    await bench.feed([(0, [plain(1, 1), plain(2, 1)]), (1, [plain(3, None)])])
    assert shown == ["m1", "m2", "m3"]


@pytest.mark.parametrize("suspends", [False, True])
@pytest.mark.parametrize("batch", [None, 10])
async def test_collector_runs_over_new_objects_while_no_message_is_in_memory(suspends: bool, batch: int | None) -> None:
    """Otherwise it would find those of the next read alive, and by and by walk over all objects of the application."""

    async def handle(_payload: Any) -> None:
        if suspends:
            await anyio.sleep_forever()

    handle.__annotations__["_payload"] = dict[str, Any] if batch is None else list[dict[str, Any]]
    bench = Bench(handle, batch=batch)
    async with anyio.create_task_group() as tasks:
        await tasks.start(bench.runner.run)
        assert bench.queue.offer_raw(bench.lanes[0], [plain(number, None) for number in range(20)], {})
        gc.collect()
        for _ in range(6):
            gc.collect(0)
        assert gc.get_count()[1] >= 6
        await bench.runner.wake()
        runs = gc.get_count()[1]
        tasks.cancel_scope.cancel()
    assert (runs >= 6) is (suspends or sys.version_info >= (3, 14))


@pytest.mark.parametrize("suspends", [False, True])
@pytest.mark.parametrize("with_other_fields", [False, True])
async def test_raw_entries_of_a_key_whose_rate_is_used_up_wait_behind_it(
    suspends: bool, with_other_fields: bool
) -> None:
    """Of each key as many start as its rate allows. The others are held in order, and messages without a key start."""
    seen = defaultdict[int, list[int]](list)

    async def handle(payload: dict[str, Any]) -> None:
        seen[payload["k"]].append(payload["n"])
        if suspends:
            await asyncio.sleep(0)

    bench = Bench(handle, batch=None, rate=Rate(3, per=timedelta(hours=1), by="key"))
    lane, queue = bench.lanes[0], bench.queue
    rows = [plain(number, number % 3 or None) for number in range(30)]
    rows = [with_headers(row) if with_other_fields and at % 2 else row for at, row in enumerate(rows)]
    async with anyio.create_task_group() as tasks:
        await tasks.start(bench.runner.run)
        assert queue.offer_raw(lane, rows, made_of(lane, rows))
        while queue.in_flight:
            await bench.runner.wake()
            await asyncio.sleep(0)
        tasks.cancel_scope.cancel()
    assert dict(seen) == {0: list(range(0, 30, 3)), 1: [1, 4, 7], 2: [2, 5, 8]}
    assert (queue.held, queue.blocked, queue.limited, lane.flows.raw_entries) == (14, 14, 14, 0)
    held = [int(message.entry_id.split(b"-")[0]) for message in queue.withdraw(lane)]
    assert [[n for n in held if n % 3 == key] for key in (1, 2)] == [list(range(10, 30, 3)), list(range(11, 30, 3))]


async def test_raw_entries_beyond_a_rate_stay_raw_and_are_counted_as_limited() -> None:
    """As many start as the rate allows; what failed or suspended counts, too."""
    seen = list[int]()

    async def handle(payload: dict[str, Any]) -> None:
        seen.append(payload["n"])
        if payload["n"] == 1:
            raise Reject("this one")
        if payload["n"] == 3:
            await asyncio.sleep(0)

    bench = Bench(handle, batch=None, rate=Rate(6, per=timedelta(hours=1)))
    lane = bench.lanes[0]
    async with anyio.create_task_group() as tasks:
        await tasks.start(bench.runner.run)
        for start in range(0, 20, 4):
            rows = [plain(number, None) for number in range(start, start + 4)]
            if not bench.queue.offer_raw(lane, rows, {}):
                bench.queue.offer(lane, [Message(lane, *row) for row in rows])
        while len(seen) < 6 or bench.runner.running_of(lane):
            await bench.runner.wake()
            await asyncio.sleep(0)
        await bench.runner.wake()
        assert (seen, bench.queue.limited, bench.queue.in_flight) == (list(range(6)), 14, 14)
        tasks.cancel_scope.cancel()


def test_handler_that_needs_messages_takes_no_raw_entries() -> None:
    """The function or a middleware has to see each message. A limit has not."""

    async def with_message(_payload: int, _message: Message) -> None: ...

    async def plainly(_payload: int) -> None: ...

    def in_thread(_payload: int) -> None: ...

    async def middleware(work: Any, call_next: Any) -> Any:
        return await call_next(work)

    assert Bench(plainly, batch=None).queue.takes_raw
    assert not Bench(with_message, batch=None).queue.takes_raw
    assert not Bench(in_thread, batch=None).queue.takes_raw
    assert build_payload_call(build_handler(plainly, "topic", group="group"), [middleware]) is None
    assert Bench(plainly, batch=None, group_concurrency=2).queue.takes_raw
    assert Bench(plainly, batch=None, rate=Rate(10)).queue.takes_raw


async def test_unreadable_payload_is_buried_without_its_neighbours() -> None:
    """It moves to the dead letters; the other raw entries are handled."""
    seen = list[int]()

    async def handle(payloads: list[dict[str, Any]]) -> None:
        seen.extend(each["n"] for each in payloads)

    bench = Bench(handle, batch=10)
    hostile = [b'1},{"n":9', b"[", b"1,2", b"", b"[1]"]
    rows = [plain(number, 1, hostile[number // 2] if number % 2 else None) for number in range(10)]
    await bench.feed([(0, rows)])
    assert seen == [0, 2, 4, 6, 8]
    assert bench.books.buried == [b"1-0", b"3-0", b"5-0", b"7-0", b"9-0"]


@pytest.mark.parametrize("batch", [None, 10])
async def test_raw_entries_do_not_start_after_their_lease(batch: int | None) -> None:
    """Raw entries of a lane whose lease has run out are dropped, not handled."""
    seen = list[Any]()

    async def handle(payloads: list[dict[str, Any]]) -> None:
        seen.extend(payloads)

    async def handle_one(payload: dict[str, Any]) -> None:
        seen.append(payload)

    bench = Bench(handle if batch else handle_one, batch=batch)
    bench.lanes[1].lease.deadline = 0.0
    await bench.feed([(1, [plain(1, 1)]), (0, [plain(0, 1)])])
    assert [each["n"] for each in seen] == [0]
    assert not bench.lanes[1].lease.is_held()


async def test_withdrawing_a_lane_takes_its_raw_entries() -> None:
    """Raw entries are handed back like everything else that has not started."""

    async def handle(_payloads: list[dict[str, Any]]) -> None:
        raise StaleEpoch("never called")

    bench = Bench(handle, batch=10)
    mine, other = bench.lanes[:2]
    assert bench.queue.offer_raw(mine, [plain(1, 1), plain(2, 1), plain(3, None)], {})
    assert bench.queue.offer_raw(other, [plain(4, 1)], {})
    assert [message.entry_id for message in bench.queue.withdraw(mine)] == [b"1-0", b"3-0", b"2-0"]
    assert (bench.queue.in_flight, mine.flows.raw_entries, mine.flows.waiting, other.flows.raw_entries) == (1, 0, {}, 1)


async def test_raw_entries_linger_until_they_fill_a_batch() -> None:
    """With a linger too few raw entries wait for more; as many as fill a batch start at once."""
    sizes = list[int]()

    async def handle(payloads: list[dict[str, Any]]) -> None:
        sizes.append(len(payloads))

    bench = Bench(handle, batch=10, linger=timedelta(hours=1))
    async with anyio.create_task_group() as tasks:
        await tasks.start(bench.runner.run)
        bench.queue.offer_raw(bench.lanes[0], [plain(number, number) for number in range(15)], {})
        await bench.runner.wake()
        assert sizes == [10]
        bench.queue.offer_raw(bench.lanes[1], [plain(number, number) for number in range(5)], {})
        await bench.runner.wake()
        assert sizes == [10, 10]
        tasks.cancel_scope.cancel()


async def test_batch_knows_its_messages_that_are_not_plain() -> None:
    """Each once, also when what was read together is more than one batch."""
    seen = list[tuple[list[int], list[str]]]()

    class Noting(Wrapping):
        def wrap(self, call_next: Any) -> Any:
            raise AssertionError("no messages are needed")

        def wrap_payload(self, call_next: Any, topic: str, group: str) -> Any:
            def call(payloads: Any) -> Any:
                messages = payloads.messages if isinstance(payloads, Payloads) else []
                seen.append(([each["n"] for each in payloads], [message.id for message in messages]))
                return call_next(payloads)

            return call

    async def handle(_payloads: list[dict[str, Any]]) -> None: ...

    handler = build_handler(handle, "topic", group="group", batch=4)
    call, lane = build_payload_call(handler, [Noting()]), make_lane()
    assert call is not None
    rows = [plain(number, 1) for number in range(10)]
    rows = [with_headers(row) if at in (1, 4, 5) else row for at, row in enumerate(rows)]
    bench = Bench(handle, batch=4)
    bench.runner._payload_call = call
    async with anyio.create_task_group() as tasks:
        await tasks.start(bench.runner.run)
        assert bench.queue.offer_raw(lane, rows, made_of(lane, rows))
        await bench.runner.wake()
        tasks.cancel_scope.cancel()
    assert seen == [([0, 1, 2, 3], ["m1"]), ([4, 5, 6, 7], ["m4", "m5"]), ([8, 9], [])]


def test_part_of_entries_has_the_messages_that_were_made_of_them() -> None:
    """At the places that the entries have in it; the others are made when they are asked for."""
    lane = make_lane()
    rows = [with_headers(plain(at, 1)) if at in (1, 4, 5) else plain(at, 1) for at in range(8)]
    raw = RawEntries(lane, rows, made_of(lane, rows))
    for start, end in ((0, 8), (0, 4), (1, 5), (2, None), (5, 6), (6, None)):
        part = raw.part(start, end)
        expected = range(8)[start:end]
        assert [message.id for message in part.messages()] == [f"m{at}" for at in expected]
        assert {start + position for position in part.made} == {1, 4, 5} & set(expected), (start, end)
        assert all(part.made[position] is raw.made[start + position] for position in part.made)


def test_messages_are_made_of_entries_that_may_start_as_they_are() -> None:
    """Not of those that are unreadable, are for another group, may expire or are too large: these are looked at."""
    base, lane = [b"data", b"x", b"id", b"1"], make_lane()
    good = [(b"%d-0" % at, [*base, *more]) for at, more in enumerate([[b"h", b"{}"], [b"type", b"text/plain"]])]
    assert made_of(lane, good).keys() == {0, 1}
    assert made_of(lane, []) == {}
    for more in (
        [b"h", b"[]"], [b"group", b"billing"], [b"expires", b"1"], [b"id", b"2"],
    ):  # fmt: skip
        assert make_messages(lane, [*good, (b"9-0", [*base, *more])], [0, 1, 2]) is None, more
    assert make_messages(lane, [(b"9-0", [b"h", b"{}", b"data", b"x"])], [0]) is None
    assert make_messages(lane, [(b"9-0", [b"data", b"x" * (LARGEST_PAYLOAD + 1), b"h", b"{}"])], [0]) is None


def test_plain_size_accepts_data_with_id_and_key_in_this_order() -> None:
    """With or without id and key: our publisher's entries, and what other clients write most. A message agrees."""
    assert plain_size([plain(1, 1, b"abc"), plain(2, None, b"de")]) == (5, [])
    for entry in (
        [b"data", b"x"], [b"data", b"x", b"key", b"k"], [b"data", b"x", b"id", b"1"],
        [b"data", b"x", b"id", b"1", b"key", b"k"],
    ):  # fmt: skip
        message = Message(make_lane(), b"2-0", entry)
        assert plain_size([plain(1, 1, b"abc"), (b"2-0", entry)]) == (4, [])
        assert key_of(entry) == message.routing_key
        assert (message.is_plain, message.data, message.headers) == (True, b"x", {})
        assert message.routing_key == (b"k" if b"key" in entry else None)
        assert (message.key, message.id) == ("k" if b"key" in entry else None, "1" if b"id" in entry else "2-0")
    for entry in (
        [b"data", b"x", b"id", b"1", b"type", b"text/plain"], [b"id", b"1", b"data", b"x"],
        [b"data", b"x", b"id", b"1", b"key", b"k", b"h", b"{}"], [b"data", b"x", b"h", b"{}"],
        [b"key", b"k", b"data", b"x"], [b"data", b"x", b"u", b"1"], [b"data", b"x", b"key", b"k", b"id", b"1"],
    ):  # fmt: skip
        assert plain_size([plain(1, 1, b"abc"), (b"2-0", entry)]) == (3, [1])
        assert not Message(make_lane(), b"2-0", entry).is_plain
    assert plain_size([(b"2-0", [])]) == (0, [0])


async def test_continuation_passes_values_exceptions_and_cancellations() -> None:
    """They reach a coroutine whose first step was run by hand."""
    seen = list[str]()

    async def work() -> str:
        try:
            await asyncio.sleep(0)
            await anyio.sleep_forever()
        except asyncio.CancelledError:
            seen.append("cancelled")
        with anyio.move_on_after(0.001):
            await anyio.sleep_forever()
        return "end"

    async def drive() -> Any:
        coroutine = work()
        return await Continuation(coroutine, coroutine.send(None))

    task = asyncio.create_task(drive())
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    task.uncancel()
    assert await task == "end"
    assert seen == ["cancelled"]
