"""Which message of a topic with bands is next, and which slots are kept for a band."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.limits import ConcurrencyLimit
from rsmq.consumer.waiting.queue import Queue
from rsmq.consumer.waiting.ready_bands import ReadyBands, ReservedSlots
from rsmq.handler.bands import BandRules
from rsmq.heartbeat.lease import Lease
from rsmq.model.keys import Keys
from rsmq.model.message import Message

ORDER = ("urgent", "normal", "bulk")
STRICT = BandRules(aging=None)


def lane_of(band: str) -> Lane:
    """A lane whose lease never ends."""
    number = ORDER.index(band)
    return Lane(Keys("t"), "t", number, "g", Lease("t", "g", number, "", "me", "1", float("inf")), band)


LANES = {band: lane_of(band) for band in ORDER}


def message(band: str, ms: int = 1, number: int = 0) -> Message:
    """A message of a band, stored at a time."""
    return Message(LANES[band], f"{ms}-{number}".encode(), [b"data", b"x"])


def bands_of(taken: list[Any]) -> list[str]:
    """The bands of what was taken."""
    return [each.origin.band for each in taken]


@given(st.lists(st.sampled_from([*ORDER, "take"]), max_size=60))
def test_strict_takes_nothing_while_a_higher_band_has_something(steps: list[str]) -> None:
    """In each order of arrivals and starts: the highest band first, each band in its own order."""
    ready, there = ReadyBands(ORDER, STRICT, lambda: 0), list[Message]()
    for number, step in enumerate(steps):
        if step != "take":
            there.append(message(step, number=number))
            ready.append(there[-1])
        elif there:
            wanted = min(there, key=lambda each: (ORDER.index(each.origin.band), there.index(each)))
            assert ready[0] is wanted
            assert ready.popleft() is wanted
            there.remove(wanted)
        assert (len(ready), bool(ready)) == (len(there), bool(there))
    assert sorted(map(id, ready)) == sorted(map(id, there))


def test_what_is_old_gets_every_eighth_start() -> None:
    """More would undo the bands: an urgent message would wait behind all of a campaign that has become old."""
    ready = ReadyBands(ORDER, BandRules(aging=timedelta(seconds=30)), lambda: 100_000)
    for number in range(40):
        ready.append(message("bulk", 60_000, number))
        ready.append(message("urgent", 99_000, number))
    taken = bands_of([ready.popleft() for _ in range(32)])
    assert Counter(taken) == {"urgent": 28, "bulk": 4}
    assert [at for at, band in enumerate(taken) if band == "bulk"] == [7, 15, 23, 31]


def test_what_is_not_old_waits_for_the_higher_bands() -> None:
    """The eighth start is for what waits longer than `aging`, and for nothing else."""
    ready = ReadyBands(ORDER, BandRules(aging=timedelta(seconds=30)), lambda: 100_000)
    for number in range(20):
        ready.append(message("bulk", 90_000, number))
        ready.append(message("urgent", 99_000, number))
    assert bands_of([ready.popleft() for _ in range(20)]) == ["urgent"] * 20


def test_weights_share_the_starts_and_an_empty_band_saves_none_up() -> None:
    """Of ten starts six, three and one; a band that had nothing gets no more than its share afterwards."""
    rules = BandRules(weights={"urgent": 6, "normal": 3, "bulk": 1})
    ready = ReadyBands(ORDER, rules, lambda: 0)
    for number in range(60):
        for band in ORDER[1:]:
            ready.append(message(band, number=number))
    assert Counter(bands_of([ready.popleft() for _ in range(40)])) == {"normal": 30, "bulk": 10}
    for number in range(60):
        ready.append(message("urgent", number=number))
    assert Counter(bands_of([ready.popleft() for _ in range(20)])) == {"urgent": 12, "normal": 6, "bulk": 2}


def test_a_queue_whose_topic_gets_bands_keeps_what_is_ready() -> None:
    """What was ready before is in its band, in order; the deque of before is empty."""
    queue = Queue(is_ordered=True)
    before = queue.ready
    queue.offer(LANES["normal"], [message("normal", number=number) for number in range(3)])
    queue.serve_bands(ORDER, STRICT, lambda: 0)
    queue.offer(LANES["urgent"], [message("urgent")])
    assert not before
    assert [queue.ready.popleft().entry_id for _ in range(4)] == [b"1-0", b"1-0", b"1-1", b"1-2"]


@pytest.mark.anyio
@pytest.mark.parametrize("limit", [None, 3])
async def test_reserved_slots_are_free_for_their_band_whatever_the_others_do(limit: int | None) -> None:
    """Of four slots two are kept for `urgent`: the others run two at most; `urgent` may take all that are free."""
    inner = None if limit is None else ConcurrencyLimit(lambda: limit)
    ready = ReadyBands(ORDER, STRICT, lambda: 0)
    slots = ReservedSlots({"urgent": 2}, lambda: 2, lambda: ready, inner)
    ready.reserve(slots.admits_band)
    gates = list[asyncio.Event]()

    async def work(started: list[str], gate: asyncio.Event) -> None:
        if slots.admits():
            started.append(ready.popleft().origin.band)
            slots.enter()
            await gate.wait()
            slots.leave()

    async def started(number: int) -> list[str]:
        found = list[str]()
        for _ in range(number):
            gates.append(asyncio.Event())
            tasks.append(asyncio.create_task(work(found, gates[-1])))
            await asyncio.sleep(0)
        return found

    tasks = list[asyncio.Task[None]]()
    for number in range(9):
        ready.append(message("bulk", number=number))
    assert (slots.room(), await started(4)) == (2, ["bulk", "bulk"])
    assert (slots.room(), ready[0]) == (0, None)
    for number in range(3):
        ready.append(message("urgent", number=number))
    assert slots.room() == (2 if limit is None else 1)
    assert await started(3) == ["urgent"] * (2 if limit is None else 1)
    for gate in gates:
        gate.set()
    await asyncio.gather(*tasks)
    assert slots.room() == 3
