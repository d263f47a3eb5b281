"""What the roles of one consumer share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rsmq.consumer.waiting.lane import Lane
from rsmq.handler.handler import Handler
from rsmq.heartbeat.lease import Lease
from rsmq.heartbeat.worker_log import WorkerLog
from rsmq.model.clock import ServerClock
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.producer import Producer
from rsmq.redis.client.connector import Client
from rsmq.redis.topics import Topic


@dataclass(slots=True, eq=False)
class ConsumerContext:
    """One member that serves one handler, and the state that its roles work on.

    `topic` is followed: its bands may change while the member runs. `producer` encodes the outputs of handlers. `lanes`
    are the partitions that the member has now, by number. `stats` counts what happened: settled, cancelled, retried,
    buried, handed_on, expired, redelivered, handed_back, refused, not_pending, lost_body, restored, deleted, reads; and
    of leases: taken, released, lost. `clock` is the server's, as the membership reads it. `worker_log`
    tells of rebalances. `encoding` undoes what publishers have encoded.
    """

    client: Client
    keys: Keys
    settings: Settings
    member: str
    topic: Topic
    handler: Handler
    lanes: dict[int, Lane] = field(default_factory=dict)
    stats: Counter[str] = field(default_factory=Counter)
    producer: Producer | None = None
    clock: ServerClock = field(default_factory=ServerClock)
    worker_log: WorkerLog = field(default_factory=WorkerLog)
    encoding: Encoding = NO_CODECS

    def follow(self, topic: Topic) -> None:
        """The topic has changed."""
        self.topic = topic

    def lane(self, partition: int, lease: Lease) -> Lane:
        """The lane of a partition that is read under this lease."""
        topic, handler, layout = self.topic, self.handler, self.topic.layout
        parents = self.parents_of(partition)
        return Lane(self.keys, topic.name, partition, handler.group, lease, layout.band_of(partition), parents)

    def parents_of(self, partition: int) -> tuple[int, ...]:
        """The partitions whose messages come before those of this one, the latest first."""
        is_ordered = self.handler.ordering != "none" and self.handler.distribution == "hash"
        return tuple(self.topic.layout.ancestors_of(partition)) if is_ordered else ()

    @property
    def name(self) -> str:
        """Topic and group, as `orders/billing`: for logs, and as the salt of what members compute alike."""
        return f"{self.topic.name}/{self.handler.group}"
