"""Which partitions this member cannot read or settle, because their nodes of the cluster do not serve it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Final, TypeVar

from rsmq.consumer.reading.fetchers import Fetchers
from rsmq.consumer.settling.settling_nodes import SettlingNodes
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.model.backoff import Backoff
from rsmq.model.clock import awake
from rsmq.redis.client.connector import Client

N = TypeVar("N", bound=Hashable)

LONGEST_REST: Final = 600.0
"""Seconds before a node is used again that has failed again and again."""


def unreadable(nodes: Mapping[int, N], failing: Collection[N], reading: Collection[int]) -> frozenset[int]:
    """The partitions at nodes that fail, except for those that are read all the same: a node may have no connection
    left for more. `nodes`: the node of each partition."""
    return frozenset(number for number, node in nodes.items() if node in failing and number not in reading)


class NodeWatch:
    """Finds the nodes at which this member cannot read or settle, and whether it can again.

    A node fails when a fetcher of a partition there, or settling, has failed for a lease. One fetcher for each such
    node goes on trying, and `SettlingNodes` asks it. A node that fails again soon after it was used again rests longer
    each time.
    """

    def __init__(self, context: ConsumerContext, fetchers: Fetchers, settling: SettlingNodes) -> None:
        self._context = context
        self._fetchers = fetchers
        self._settling = settling
        self._lease_seconds = context.settings.lease_ttl.total_seconds()
        self._failing = dict[Client, int]()  # with the partition whose fetcher tries it
        self._unsettled = set[Client]()  # those of them where settling has failed for a lease
        self._rests = dict[Client, Backoff]()
        self._rests_until = dict[Client, float]()
        self.partitions = frozenset[int]()
        """Those that cannot be read or settled."""
        self.trouble = ""
        """Why; empty if all can."""

    def _nodes(self) -> dict[int, Client]:
        client, keys, topic = self._context.client, self._context.keys, self._context.topic
        return {number: client.node_for(keys.stream(topic.name, number)) for number in topic.numbers}

    def one_of_each(self) -> list[int]:
        """One partition of each node."""
        return list({node: number for number, node in self._nodes().items()}.values())

    def begin(self) -> None:
        """Before joining: the nodes whose reader is not open yet, or which settle nothing, fail."""
        fetchers, nodes = self._fetchers.by_partition(), self._nodes()
        self._failing = {
            nodes[number]: number for number in self.one_of_each()
            if number in fetchers and not fetchers[number].connected.is_set()
        }  # fmt: skip
        self._unsettled = set(self._settling.failing)
        for number, node in nodes.items():
            if node in self._unsettled:
                self._failing.setdefault(node, number)
        self._note(nodes)

    def look(self, works_since: float) -> bool:
        """Look at all nodes. True: `partitions` has changed. `works_since`: what failed before counts from then on."""
        fetchers, now = self._fetchers.by_partition(), awake()
        failing = {number: since for number, each in fetchers.items() if (since := each.failing_since) is not None}
        unsettled = self._settling.failing
        if not failing and not self._failing and not unsettled:
            return False
        nodes = self._nodes()
        self._unsettled &= unsettled.keys()
        for node, number in list(self._failing.items()):
            fetcher = fetchers.get(number)
            is_open = fetcher is not None and fetcher.failing_since is None and fetcher.connected.is_set()
            if (is_open and node not in self._unsettled and now >= self._rests_until.get(node, 0.0)) or (
                node not in nodes.values()  # its slots have moved
            ):
                del self._failing[node]
                self._rests_until[node] = now + 2 * self._lease_seconds  # if it fails before that, it rests longer
        for number, since in failing.items():
            if number in nodes and now - max(since, works_since) >= self._lease_seconds:
                self._fail(nodes[number], number, now)
        for number, node in nodes.items():
            if node in unsettled and now - max(unsettled[node].since, works_since) >= self._lease_seconds:
                self._unsettled.add(node)
                self._fail(node, number, now)
        return self._note(nodes)

    def _fail(self, node: Client, number: int, now: float) -> None:
        if node in self._failing:
            return
        self._failing[node] = number
        rest = self._rests.setdefault(node, Backoff(self._lease_seconds / 2, LONGEST_REST))
        if now >= self._rests_until.get(node, 0.0):
            rest.reset()
        self._rests_until[node] = now + rest.next()

    def _note(self, nodes: Mapping[int, Client]) -> bool:
        before, fetchers = self.partitions, self._fetchers.by_partition()
        reading = [
            number for number in self._context.lanes
            if number in fetchers and fetchers[number].failing_since is None
            and nodes.get(number) not in self._unsettled
        ]  # fmt: skip
        self.partitions = unreadable(nodes, self._failing, reading)
        troubles = [fetchers[number].trouble for number in self._failing.values() if number in fetchers]
        troubles += [self._settling.failing[node].trouble for node in self._unsettled if node in self._settling.failing]
        self.trouble = next(filter(None, troubles), "no connection") if self._failing else ""
        self._fetchers.probe(list(self._failing.values()))
        return self.partitions != before

    def __repr__(self) -> str:
        return f"<NodeWatch {self._context.name} unreadable={sorted(self.partitions)}>"
