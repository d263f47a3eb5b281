"""One log line for each rebalance."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq.heartbeat.partition_log import PartitionChange, PartitionLog, ranges
from rsmq.heartbeat.worker_log import WorkerLog


def test_rebalance_is_one_line_when_it_has_settled(caplog: pytest.LogCaptureFixture) -> None:
    """Partitions that come one by one are one line; a handover that cannot be done is logged as it is."""
    caplog.set_level(logging.INFO, "rsmq.consumer")
    log = PartitionLog("orders/billing", WorkerLog().partitions)
    for turn in range(1, 9):
        log.note(set(range(turn)), set(range(8)), 8)
    log.note(set(range(8)), set(range(4)), 8)
    log.note(set(range(6)), set(range(4)), 8)
    log.note(set(range(6)), set(range(4)), 8)
    log.note({0, 1, 2, 3, 7}, {0, 1, 2, 3, 7}, 8)
    log.note(set(), set(), 8)
    assert [record.getMessage() for record in caplog.records] == [
        "orders/billing: reads 8 of 8 partitions: 0-7 (took 0-7)",
        "orders/billing: reads 6 of 8 partitions: 0-5 (gave up 6-7)",
        "orders/billing: reads 5 of 8 partitions: 0-3 7 (took 7, gave up 4-5)",
        "orders/billing: reads 0 of 8 partitions (gave up 0-3 7)",
    ]


async def test_a_worker_with_several_handlers_writes_one_line_for_all(caplog: pytest.LogCaptureFixture) -> None:
    """What moved over all of them since the last line, who has gone and joined, and what is repeated."""
    caplog.set_level(logging.INFO, "rsmq")
    worker, stats = WorkerLog(10), Counter[str]()
    worker.watch([stats])
    for n in range(10):
        worker.members(f"t{n}/g", ("me", "b", "c"), ("me", "b"))
        worker.partitions(PartitionChange(f"t{n}/g", 8, {0, 1}, {0, 1, n % 8}))
        worker.partitions(PartitionChange(f"t{n}/g", 8, {0, 1, n % 8}, {0, n % 8}))
        worker.members(f"t{n}/g", ("me", "b"), ("me", "b", "d"))
    stats["redelivered"] = 3
    worker.flush()
    worker.flush()
    assert [record.getMessage() for record in caplog.records] == [
        "c has gone, d has joined: 10 handlers have 3 members; took 6 partitions of 6 handlers, gave up 8 partitions "
        "of 8 handlers; 3 messages are repeated",
    ]


@given(st.sets(st.integers(min_value=0, max_value=30)))
def test_ranges_name_every_number_once(numbers: set[int]) -> None:
    """What the text names is what was given."""
    named = list[int]()
    for part in ranges(numbers).split():
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(numbers)
