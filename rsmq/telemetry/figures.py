"""A worker's own counters as samples, read when somebody asks: the hot path does not know of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rsmq.broker import Broker
from rsmq.clock import monotonic
from rsmq.consumer.consumer import Consumer
from rsmq.inspector import installed
from rsmq.telemetry.metric import (
    BEAT_AGE,
    BURIED,
    BUSY,
    DELETED,
    HANDED_BACK,
    IN_HAND,
    INFO,
    LEASE_MOVES,
    LIMIT,
    LONGEST,
    LOST_BODIES,
    NOT_PENDING,
    OWNED,
    PUBLISHED,
    READ_AGE,
    READS,
    REDELIVERED,
    REFUSED,
    RESTORED,
    RETRIED,
    SERVING,
    SETTLED,
    SHELVED,
    UNPUBLISHED,
    Metric,
    Sample,
)  # fmt: skip

COUNTED: Final[dict[str, Metric]] = {
    "settled": SETTLED, "retried": RETRIED, "buried": BURIED, "redelivered": REDELIVERED, "handed_back": HANDED_BACK,
    "lost_body": LOST_BODIES, "restored": RESTORED, "deleted": DELETED, "refused": REFUSED,
    "not_pending": NOT_PENDING, "reads": READS,
}  # fmt: skip
MOVES: Final = ("taken", "released", "lost")


class Figures:
    """Reads one broker, with or without a worker. Called from any thread; a value may be a message old."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def read(self) -> Iterator[Sample]:
        """Everything this process knows of itself."""
        worker, producer = self._broker.worker, self._broker.producer
        yield Sample(SERVING, (), worker is not None and worker.is_serving)
        if worker is not None:
            yield Sample(INFO, (worker.member, installed("rsmq")), 1)
            if worker.beat is not None:
                yield Sample(BEAT_AGE, (), monotonic() - worker.beat.landed)
            for consumer in tuple(worker.consumers):
                yield from of_consumer(consumer)
        if producer is not None:
            yield from (Sample(PUBLISHED, (topic,), count) for topic, count in producer.stored.items())
            yield from (Sample(UNPUBLISHED, (topic,), count) for topic, count in producer.failed.items())


def of_consumer(consumer: Consumer) -> Iterator[Sample]:
    """The figures of one handler."""
    place = (consumer.topic.name, consumer.handler.group)
    stats, now = dict(consumer.stats), monotonic()
    for name, metric in COUNTED.items():
        yield Sample(metric, place, stats.get(name, 0))
    for move in MOVES:
        yield Sample(LEASE_MOVES, (*place, move), stats.get(move, 0))
    started = [slot.started for slot in consumer.slots if slot.messages]
    turned = [reader.succeeded for reader in consumer.readers]
    yield Sample(OWNED, place, len(consumer.lanes))
    yield Sample(IN_HAND, place, consumer.queue.in_hand)
    yield Sample(SHELVED, place, consumer.queue.shelved)
    yield Sample(BUSY, place, len(started))
    yield Sample(LIMIT, place, consumer.most_calls)
    yield Sample(LONGEST, place, now - min(started, default=now))
    yield Sample(READ_AGE, place, now - min(turned, default=now))
