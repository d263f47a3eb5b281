"""The metrics of one worker process: its own counters, read at a scrape, and the duration of handler calls."""

from __future__ import annotations

from asyncio import CancelledError
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterator
from time import perf_counter
from typing import Any, Final

from rsmq.broker import Broker
from rsmq.broker.broker import producer_of
from rsmq.consumer.consumer import Consumer
from rsmq.handler.middleware import Call, Wrapping
from rsmq.handler.returned import completed, errors_in
from rsmq.model.call_counts import BOUNDS, SHORT
from rsmq.model.clock import monotonic
from rsmq.model.own_process import own_version
from rsmq.telemetry import metric
from rsmq.telemetry.metric import Histogram, Metric, Sample

COUNTED: Final[dict[str, Metric]] = {
    "settled": metric.SETTLED, "retried": metric.RETRIED, "cancelled": metric.CANCELLED, "buried": metric.BURIED,
    "handed_on": metric.HANDED_ON, "expired": metric.EXPIRED, "redelivered": metric.REDELIVERED,
    "handed_back": metric.HANDED_BACK, "lost_body": metric.LOST_BODIES, "trimmed": metric.TRIMMED,
    "restored": metric.RESTORED,
    "deleted": metric.DELETED, "refused": metric.REFUSED, "not_pending": metric.NOT_PENDING, "reads": metric.READS,
    "opened": metric.OPENED,
}  # fmt: skip
MOST_TENANTS: Final = 3
MOVES: Final = ("taken", "released", "lost")


class WorkerMetrics:
    """Reads one broker, with or without a worker. Called from any thread; a value may be a message old."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def read(self) -> Iterator[Sample]:
        """Everything that this process knows about itself."""
        worker, producer, cancelled = self._broker.worker, producer_of(self._broker), Counter(self._broker.cancelled)
        yield Sample(metric.SERVING, (), worker is not None and worker.is_serving)
        if worker is not None:
            yield Sample(metric.INFO, (worker.member, own_version()), 1)
            if worker.heartbeat is not None:
                yield Sample(metric.HEARTBEAT_AGE, (), monotonic() - worker.heartbeat.last_confirmed)
            for consumer in tuple(worker.consumers):
                yield from of_consumer(consumer, cancelled)
        yield from (Sample(metric.CANCELLED, labels, count) for labels, count in cancelled.items() if count)
        for service in tuple(self._broker.services):
            yield from of_service(service)
        if producer is not None:
            yield from (Sample(metric.PUBLISHED, (topic,), count) for topic, count in producer.stored.items())
            yield from (Sample(metric.UNPUBLISHED, (topic,), count) for topic, count in producer.failed.items())


def of_consumer(consumer: Consumer, cancelled: Counter[tuple[str, str]]) -> Iterator[Sample]:
    """The metrics of one handler. What `broker.cancel` has settled for its group is taken out of `cancelled`."""
    labels = (consumer.topic.name, consumer.handler.group)
    stats, now = dict(consumer.stats), monotonic()
    stats["cancelled"] = stats.get("cancelled", 0) + cancelled.pop(labels, 0)
    for name, counted in COUNTED.items():
        yield Sample(counted, labels, stats.get(name, 0))
    for move in MOVES:
        yield Sample(metric.LEASE_MOVES, (*labels, move), stats.get(move, 0))
    started = [task_slot.started for task_slot in consumer.task_slots if task_slot.messages]
    yield Sample(metric.OWNED, labels, len(consumer.lanes))
    work = consumer.work
    yield Sample(metric.RUNNING, labels, work.running)
    yield Sample(metric.READY, labels, work.ready)
    yield from (Sample(metric.WAITING, (*labels, reason), count) for reason, count in work.reasons.items())
    if consumer.handler.tenants is not None:  # by rank: the name of a tenant would be a label without a bound
        tenants = consumer.tenants
        yield Sample(metric.TENANTS, labels, len(tenants))
        ranks = enumerate(tenants[:MOST_TENANTS], 1)
        yield from (Sample(metric.TENANT_WAITING, (*labels, str(rank)), count) for rank, count in ranks)
    for needs, seconds in consumer.missing_keys.items():
        yield Sample(metric.MISSING_KEY, (*labels, needs), seconds)
    yield Sample(metric.BUSY, labels, len(started))
    yield Sample(metric.LIMIT, labels, consumer.max_calls)
    yield Sample(metric.LONGEST, labels, now - min(started, default=now))
    yield Sample(metric.READ_AGE, labels, consumer.read_age)


def of_service(service: object) -> Iterator[Sample]:
    """The metrics of an outbox. Its class is not named here: it needs an extra."""
    figures = getattr(service, "_figures", None)
    if figures is None:
        return
    name, relayed, kept_out, status = figures()
    yield Sample(metric.RELAYED, (name,), relayed)
    yield Sample(metric.KEPT_OUT, (name,), kept_out)
    if status is not None:
        yield Sample(metric.OUTBOX_ROWS, (name,), status.backlog)
        yield Sample(metric.OUTBOX_AGE, (name,), status.age_seconds)
        yield Sample(metric.OUTBOX_REFUSED, (name,), status.refused)


class HandlerDuration(Wrapping):
    """A middleware that times every handler call; a batch is one call. It exists only where metrics are on.

    Time that a handler spends waiting counts, because its messages wait for it.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker  # its handlers may be registered later
        self._seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)
        self._failures = Counter[tuple[str, str]]()

    def wrap(self, call_next: Call) -> Call:
        """Time the call of a message or of a batch."""
        timed: Call | None = None

        def call(work: Any) -> Awaitable[Any]:
            nonlocal timed
            if timed is None:  # a call belongs to one handler
                origin = (work if type(work) is not list else work[0]).origin
                timed = self.wrap_payload(call_next, origin.topic, origin.group)
            return timed(work)

        return call

    def wrap_payload(self, call_next: Call, topic: str, group: str) -> Call:
        """Time a call that gets only payloads."""
        key, histogram = (topic, group), self._seconds[topic, group]
        counts = histogram.counts

        async def timed(work: Any) -> Any:
            started = perf_counter()
            try:
                result = await call_next(work)
                if result is not None:
                    result = await completed(result)  # an error that is returned fails the call, too
                    if (failed := errors_in(result)) and failed == len(result):
                        self._failures[key] += 1
                return result
            except BaseException as error:
                if not isinstance(error, CancelledError):
                    self._failures[key] += 1
                raise
            finally:
                seconds = perf_counter() - started
                counts[0 if seconds <= SHORT else bisect_left(BOUNDS, seconds)] += 1  # `observe`, without its call
                histogram.sum += seconds

        return timed

    def read(self) -> Iterator[Sample]:
        """The counts so far."""
        for each in tuple(self._broker.handlers):
            key = each.topic, each.group
            yield Sample(metric.SECONDS, (*key, each.name), self._seconds[key])
            yield Sample(metric.FAILED, (*key, each.name), self._failures[key])
