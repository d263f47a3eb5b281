"""The servers of the bank: one, a master that Sentinel replaces, or a cluster; and what goes wrong with them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.cluster.cluster import Cluster
from tests.sentinel.sentinels import Sentinels
from tests.servers import Server, wait_until

On = Literal["server", "sentinel", "cluster"]


@dataclass(slots=True)
class BankServers:
    """One server, which lives on. `replicas`: how many confirm a publish, so that it outlives a failover."""

    url: str
    directory: Path
    replicas: int = 0
    failovers: int = 0
    moved: int = 0

    def fail(self, streams: list[str]) -> None:
        """One fault; `streams` are those of the bank. Returns when all is whole again."""


@dataclass(slots=True)
class SentinelServers(BankServers):
    """The master is killed, and comes back as a replica of the next one."""

    sentinels: Sentinels | None = None

    def fail(self, streams: list[str]) -> None:
        """Kill the master."""
        assert self.sentinels is not None
        running, before = self.sentinels, self.sentinels.master_port()
        victim = next((member for member in running.members if member.port == before), None)
        if victim is None:
            return  # the sentinels do not agree yet
        victim.kill()
        wait_until(lambda: running.master_port() not in (0, before), "another master")
        victim.start()
        wait_until(running.is_whole, "both others are its replicas")
        self.failovers += 1


@dataclass(slots=True)
class ClusterServers(BankServers):
    """A slot moves under the load, or a master is killed and comes back as a replica."""

    cluster: Cluster | None = None

    def fail(self, streams: list[str]) -> None:
        """One of both."""
        assert self.cluster is not None
        stream = random.choice(streams)
        if random.random() < 0.5:
            self.cluster.migrate_at_once(stream)
            self.moved += 1
            return
        victim = self.cluster.owner(stream)
        others = [member for member in self.cluster.members if member is not victim]
        victim.kill()
        wait_until(lambda: self.cluster and self.cluster.owner(stream, others) is not victim, "its replica takes over")
        self.cluster.heal()
        self.failovers += 1


@contextmanager
def bank_servers(on: On) -> Iterator[BankServers]:
    """Servers of their own."""
    if on == "server":
        with Server(aof=True) as server:
            yield BankServers(server.url, server.directory)
    elif on == "sentinel":
        with Sentinels() as sentinels:
            yield SentinelServers(sentinels.url, sentinels.first.directory, 1, sentinels=sentinels)
    else:
        with Cluster() as cluster:
            yield ClusterServers(cluster.url, cluster.members[0].directory, 1, cluster=cluster)
