"""The send queue: batches that wait to be written, in order for each partition."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Final, TypeVar

from rsmq.model.clock import awake, to_ms
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.producer.batch import Batch
from rsmq.redis.client.connector import Client
from rsmq.redis.topics import Topic

REST: Final = 0.02
"""Seconds before a partition whose slot is moving is tried again."""

B = TypeVar("B", bound=Batch)


class SendQueue:
    """The batches of one producer that ask for the same number of replicas.

    Each node has a sender, which takes the batches for that node; a single server has one sender. `start_sender` starts
    it and returns the event that wakes it. Invariant: at most one batch of a partition is in flight, so no batch
    overtakes one that is sent again, even if its slot moves. `stored` and `failed` count messages by topic.
    """

    def __init__(
        self,
        client: Client,
        keys: Keys,
        settings: Settings,
        replicas: int,
        start_sender: Callable[[SendQueue, Client], asyncio.Event],
    ) -> None:
        self._client = client
        self._keys = keys
        self.replicas = replicas
        self._start_sender = start_sender
        self._patience = settings.unavailable_timeout.total_seconds()
        self._window_ms = to_ms(settings.dedup_window)
        self.stored: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._queues: dict[str, deque[Batch]] = {}
        self._busy: set[str] = set()  # streams with a batch in flight, or whose slot is moving
        self._held = False  # whether a batch waits for those of the partitions before its own
        self._wake_ups: dict[Client, asyncio.Event] = {}
        client.watch_slots(self.wake_all)  # the sender that was woken for a batch may not be the one to take it now

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
        deadline = awake() + self._patience
        return kind(
            self._keys, topic, partition, stream, deadline=deadline, window_ms=self._window_ms,
            is_cluster=self._client.is_cluster,
        )  # fmt: skip

    def open(self, batch: B) -> B:
        """Queue a batch as the last one of its partition."""
        self._queues.setdefault(batch.stream, deque()).append(batch)
        self._wake(batch.stream)
        return batch

    # -- for the senders ---------------------------------------------------------------------------------

    def take(self, node: Client, most: int | None = None) -> list[Batch]:
        """The first batch of every partition on this node. `end` must follow for all of them."""
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
        """The batches are not in flight any more. What is left of one goes to the front of its queue and is sent again,
        for the streams in `resting` a little later."""
        for batch in batches:
            if batch.ids:
                self._queues.setdefault(batch.stream, deque()).appendleft(batch)
            if batch.stream in resting:
                asyncio.get_running_loop().call_later(REST, self._release, batch.stream)
            else:
                self._release(batch.stream)

    def _release(self, stream: str) -> None:
        self._busy.discard(stream)
        if stream in self._queues:
            self._wake(stream)
        if self._held:
            self._held = False
            self.wake_all()

    def follow(self, batch: Batch, topic: Topic) -> None:
        """The partition of a batch is sealed. What is left of it, and what waits behind it, goes to the partitions of
        the topic that follow: before all that was published to these, in its order."""
        for each in (batch, *self._queues.pop(batch.stream, ())):
            made = dict[int, Batch]()

            def batch_for(
                route: bytes | str, of: Batch = each, of_partition: int = batch.partition, made: dict[int, Batch] = made
            ) -> Batch:
                partition = topic.layout.partition_after(of_partition, route)
                if partition not in made:
                    made[partition] = self.new(type(of), topic, partition, self._keys.stream(topic.name, partition))
                return made[partition]

            for moved in each.move(batch_for):
                queue = self._queues.setdefault(moved.stream, deque())
                queue.insert(sum(1 for _ in takewhile(lambda other: other.is_moved, queue)), moved)
                self._wake(moved.stream)

    def expire(self, node: Client, end: Callable[[Batch], None], until: float | None) -> None:
        """`end` the waiting batches of this node with a deadline before `until`; without it, those of all nodes."""
        for stream in list(self._queues if until is None else self._waiting(node)):
            for batch in self._queues[stream]:
                batch.is_closed = True  # later messages join a new batch, with a deadline of its own
                if until is None or batch.deadline <= until:
                    end(batch)
        self._queues = {stream: queue for stream, queue in self._queues.items() if any(batch.ids for batch in queue)}

    def wake_all(self) -> None:
        """Wake the sender of every waiting partition: the slots may have moved."""
        for stream in list(self._queues):
            self._wake(stream)

    def _waiting(self, node: Client) -> Iterator[str]:
        for stream, queue in self._queues.items():
            if stream not in self._busy and self._client.node_for(stream) is node:
                if queue[0].after and any(each in self._queues or each in self._busy for each in queue[0].after):
                    self._held = True
                    continue
                yield stream

    def _wake(self, stream: str) -> None:
        node = self._client.node_for(stream)
        wake_up = self._wake_ups.get(node)
        if wake_up is None:
            wake_up = self._wake_ups[node] = self._start_sender(self, node)
        wake_up.set()

    def __repr__(self) -> str:
        waiting = sum(len(batch.ids) for queue in self._queues.values() for batch in queue)
        return f"<SendQueue replicas={self.replicas} waiting={waiting}>"
