"""A line: what waits to be written, batch by batch and partition by partition, until a carrier takes it away."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import anyio.abc

from rsmq.clock import monotonic, to_ms
from rsmq.connect import Client
from rsmq.keys import Keys
from rsmq.producer.batch import Batch
from rsmq.producer.carrier import Carrier
from rsmq.producer.doubt import Doubts
from rsmq.settings import Settings
from rsmq.topic import Topic

REST: Final = 0.02
"""Seconds before a partition whose slot is moving is tried again."""

B = TypeVar("B", bound=Batch)


class Line:
    """The batches of one producer that ask for the same number of replicas, in order for each partition.

    A carrier for each node takes what that node holds; on a single server there is one, which takes all. Invariant: at
    most one batch of a partition is in flight, so that whatever has to be sent again cannot be overtaken, wherever its
    slot has moved meanwhile. `stored` and `failed` count messages by topic.
    """

    def __init__(
        self,
        client: Client,
        keys: Keys,
        settings: Settings,
        doubts: Doubts,
        tasks: anyio.abc.TaskGroup,
        replicas: int = 0,
    ) -> None:
        self._client, self._keys, self._settings, self._doubts = client, keys, settings, doubts
        self._tasks, self.replicas = tasks, replicas
        self._patience = settings.unavailable_timeout.total_seconds()
        self._window_ms = to_ms(settings.dedup_window)
        self.stored: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._queues: dict[str, deque[Batch]] = {}
        self._busy: set[str] = set()  # partitions with a batch in flight, or at rest
        self._carriers: dict[Client, Carrier] = {}

    # -- filling --------------------------------------------------------------------------------------------------

    def batch(self, kind: type[B], topic: Topic, partition: int, stream: str) -> B:
        """The batch that the next message of this kind for this partition joins."""
        queue = self._queues.get(stream)
        if queue:
            last = queue[-1]
            if type(last) is kind and last.topic is topic and last.whole is None and not last.is_full:
                return last
        return self.open(self.new(kind, topic, partition, stream))

    def new(self, kind: type[B], topic: Topic, partition: int, stream: str) -> B:
        """An empty batch, not queued yet."""
        deadline = monotonic() + self._patience
        return kind(self._keys, topic, partition, stream, deadline=deadline, window_ms=self._window_ms)

    def open(self, batch: B) -> B:
        """Queue a batch as the last one of its partition."""
        self._queues.setdefault(batch.stream, deque()).append(batch)
        self._call(batch.stream)
        return batch

    # -- what carriers do with it ---------------------------------------------------------------------------------

    def take(self, node: Client, most: int | None = None) -> list[Batch]:
        """The first batch of every partition that this node holds; `end` must follow for all of them."""
        batches = []
        for stream in list(self._waiting(node))[:most]:
            queue = self._queues[stream]
            batch = queue.popleft()
            batch.is_closed = True
            batches.append(batch)
            if not queue:
                del self._queues[stream]
        self._busy.update(batch.stream for batch in batches)
        return batches

    def end(self, batches: list[Batch], resting: set[str]) -> None:
        """These are not in flight any more. What is left in one is first in its queue, and tried again: where its slot
        is now, or, if that is just moving, a little later."""
        for batch in batches:
            if batch.ids:
                self._queues.setdefault(batch.stream, deque()).appendleft(batch)
            if batch.stream in resting:
                asyncio.get_running_loop().call_later(REST, self._rested, batch.stream)
            else:
                self._rested(batch.stream)

    def _rested(self, stream: str) -> None:
        self._busy.discard(stream)
        if stream in self._queues:
            self._call(stream)

    def give_up(self, node: Client, end: Callable[[Batch], None], until: float | None) -> None:
        """`end` every waiting batch of this node whose deadline has passed by then; all of any node without it."""
        for stream in list(self._queues if until is None else self._waiting(node)):
            for batch in self._queues[stream]:
                batch.is_closed = True  # who comes now gets a deadline of their own
                if until is None or batch.deadline <= until:
                    end(batch)
        self._queues = {stream: queue for stream, queue in self._queues.items() if any(batch.ids for batch in queue)}

    def call_all(self) -> None:
        """The slots may have moved: let every waiting partition be taken by whoever serves it now."""
        for stream in list(self._queues):
            self._call(stream)

    def _waiting(self, node: Client) -> Iterator[str]:
        for stream in self._queues:
            if stream not in self._busy and self._client.node_for(stream) is node:
                yield stream

    def _call(self, stream: str) -> None:
        node = self._client.node_for(stream)
        carrier = self._carriers.get(node)
        if carrier is None:
            carrier = self._carriers[node] = Carrier(self, self._client, node, self._keys, self._settings, self._doubts)
            self._tasks.start_soon(carrier.run)
        carrier.wake.set()

    def __repr__(self) -> str:
        waiting = sum(len(batch.ids) for queue in self._queues.values() for batch in queue)
        return f"<Line replicas={self.replicas} waiting={waiting} {list(self._carriers.values())}>"
