"""A member of many partitions: what it costs must not grow with their number squared."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from rsmq import Broker, Settings
from rsmq.consumer.owning import rebalancer
from rsmq.consumer.reading.fetcher import Fetcher
from rsmq.consumer.reading.fetchers import Fetchers
from rsmq.consumer.waiting.lane import Lane
from rsmq.model.page_limit import PageLimit
from tests.contract.witness import lanes
from tests.patience import until

PARTITIONS = 48


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """A broker whose topic has many partitions."""
    return Broker(replace(settings, partitions=PARTITIONS, prefetch=512, preflight="warn"))


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The partitions that each read names."""
    found, pack = list[list[int]](), Fetcher._read_command

    def noted(self: Fetcher, chosen: list[Lane], count: int) -> bytes:
        found.append([lane.partition for lane in chosen])
        return pack(self, chosen, count)

    monkeypatch.setattr(Fetcher, "_read_command", noted)
    return found


async def test_lanes_are_read_in_turn_while_reading_is_behind(broker: Broker, named: list[list[int]]) -> None:
    """Each read names few lanes and takes many entries of each; all have their turn; without a backlog it names all."""
    seen = set[int]()

    @broker.handler("t", group="g", batch=500)
    async def handle(payloads: list[int]) -> None:
        seen.update(payloads)

    async with broker:
        await broker.publish_many("t", range(20_000))
    async with broker.running():
        await until(lambda: len(seen) == 20_000, "all are handled")
        in_turn = [each for each in named if len(each) <= 512 // 2 // 64]
        assert {partition for each in in_turn for partition in each} == set(range(PARTITIONS))
        await until(lambda: len(named[-1]) == PARTITIONS, "the last read waits for all of them")


async def test_a_partition_with_a_backlog_among_many_idle_ones_is_read_in_large_portions(
    broker: Broker, named: list[list[int]]
) -> None:
    """A read of all partitions has a small count for each. The others have their turn between two of its reads."""
    seen = list[int]()

    @broker.handler("t", group="g", batch=500)
    async def handle(payloads: list[int]) -> None:
        seen.extend(payloads)

    async with broker:
        await broker.publish_many("t", range(4_000), key=lambda _: "one")
    async with broker.running():
        await until(lambda: len(seen) == 4_000, "all are handled")
        counts = list(map(len, named))
        assert counts.count(1) >= 4_000 // 256 - 1
        assert (1, 1) not in pairwise(counts)
        assert len(counts) < 100


async def test_a_partition_with_a_backlog_has_its_turn_while_pages_are_small(broker: Broker) -> None:
    """After a server that breaks off again and again, a read names a few partitions only: each has its turn."""
    seen = list[int]()

    @broker.handler("t", group="g", batch=500)
    async def handle(payloads: list[int]) -> None:
        seen.extend(payloads)

    async with broker.running():
        await until(lambda: len(lanes(broker)) == PARTITIONS, "it has all")
        limit = broker.client.page_limit = PageLimit(lambda: 0.0)  # its clock stands still: pages stay small
        for _ in range(7):
            limit.broke(limit.part, "a restart")
        await broker.publish_many("t", range(50), key=lambda _: "one")
        await until(lambda: len(seen) == 50, "all are handled")


async def test_leases_that_are_granted_together_interrupt_the_fetcher_once(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each interruption ends a read of all lanes: one for each lease would read a lane as often as there are lanes."""
    interruptions, interrupt = list[int](), Fetchers.interrupt

    async def noted(self: Fetchers) -> None:
        interruptions.append(len(lanes(broker)))
        await interrupt(self)

    monkeypatch.setattr(Fetchers, "interrupt", noted)
    monkeypatch.setattr(rebalancer, "TOGETHER", 60.0, raising=False)

    @broker.handler("t", group="g")
    async def handle(_payload: int) -> None:
        """Never called: nothing is published."""

    async with broker.running():
        await until(lambda: len(lanes(broker)) == PARTITIONS, "it has all")
        await until(lambda: PARTITIONS in interruptions, "the fetcher has heard of them")
        assert [each for each in interruptions if each] == [PARTITIONS]
