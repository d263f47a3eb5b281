"""A real Redis Cluster of three masters with a replica each, put together by hand: no tool, no configuration file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, Self

import redis

from rsmq.redis.wire.slots import SLOTS, slot_of
from rsmq.testing.server import free_port
from tests.servers import Server, wait_until

MASTERS = 3
PAGE = 2
"""Keys moved at a time: few, so that a slot stays between two nodes for a while."""
NODE_TIMEOUT_MS = 1000
"""How long a master is away before its replica asks to replace it."""


class Member(Server):
    """One node. Its bus has a port of its own: `port + 10000` may not exist."""

    def __init__(self) -> None:
        super().__init__(
            "--cluster-enabled", "yes", "--cluster-port", str(free_port()),
            "--cluster-node-timeout", str(NODE_TIMEOUT_MS), "--cluster-replica-validity-factor", "0",
            "--cluster-allow-replica-migration", "no", "--repl-diskless-sync-delay", "0",
            tcp=True, aof=True,
        )  # fmt: skip
        self.bus = int(self._args[3])
        self.id = ""

    def ask(self, *command: object) -> Any:
        """One command, as any client would send it."""
        with self.client() as client:
            return client.execute_command(*command)

    def cluster_state(self) -> str:
        """`ok` or `fail`, as this node sees it."""
        with self.client() as client:
            return str(client.execute_command("CLUSTER INFO")["cluster_state"])

    def replication(self) -> dict[str, Any]:
        """Its role and its replication links."""
        with self.client() as client:
            return dict(client.info("replication"))

    @property
    def role(self) -> str:
        """`master` or `slave`."""
        return str(self.replication()["role"])


class Cluster:
    """Six nodes; the first three begin as masters. Kill one with `member.kill()`, bring it back with `heal`."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """Two seeds that begin as masters, as `RSMQ_URL` would name them."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{member.port}" for member in self.members[:2])

    def __enter__(self) -> Self:
        try:
            for _ in range(2 * MASTERS):
                self.members.append(self._stack.enter_context(Member()))
            self._join()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def _join(self) -> None:
        share = SLOTS // MASTERS + 1
        for number, member in enumerate(self.members):
            member.id = member.ask("CLUSTER", "MYID").decode()
            member.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number < MASTERS:
                member.ask("CLUSTER", "ADDSLOTSRANGE", number * share, min(SLOTS, (number + 1) * share) - 1)
        for member in self.members[1:]:
            member.ask("CLUSTER", "MEET", "127.0.0.1", self.members[0].port, self.members[0].bus)
        wait_until(
            lambda: all(len(self._known(member)) == 2 * MASTERS for member in self.members),
            "every node knows every other",
        )
        for master, replica in zip(self.members, self.members[MASTERS:], strict=False):
            replica.ask("CLUSTER", "REPLICATE", master.id)
        self.settle()

    def _known(self, member: Member) -> list[str]:
        lines = member.ask("CLUSTER", "NODES").decode().splitlines()
        return [line for line in lines if "handshake" not in line]

    def settle(self) -> None:
        """Wait until every slot is served, every replica is in sync, and all nodes have the same slot map."""
        wait_until(self._is_settled, "the cluster is whole")

    def _is_settled(self) -> bool:
        with suppress(redis.RedisError):
            maps = {self._map(member) for member in self.members}
            links = [member.replication() for member in self.members]
            return (
                len(maps) == 1
                and all(member.cluster_state() == "ok" for member in self.members)
                and sum(link["role"] == "slave" for link in links) == MASTERS
                and all(link.get("master_link_status", "up") == "up" for link in links)
                and all(link["connected_slaves"] == (link["role"] == "master") for link in links)
            )
        return False

    def _map(self, member: Member) -> tuple[tuple[int, int, int], ...]:
        return tuple(sorted((first, last, where[1]) for first, last, where, *_ in member.ask("CLUSTER", "SLOTS")))

    def heal(self) -> None:
        """Start or resume every node that is down and wait until the cluster is whole again."""
        for member in self.members:
            if not member.is_running:
                member.start()
            member.resume()
        self.settle()

    @property
    def masters(self) -> list[Member]:
        """The nodes that serve slots now."""
        return [member for member in self.members if member.is_running and member.role == "master"]

    def owner(self, key: str, asked: Sequence[Member] = ()) -> Member:
        """The master that serves a key now, as the first running node (out of `asked`) sees it."""
        slot, witness = slot_of(key), next(member for member in asked or self.members if member.is_running)
        for first, last, (_, port, *_), *_ in witness.ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(member for member in self.members if member.port == port)
        raise AssertionError(f"slot {slot} is served by no node")

    def migrate(self, key: str) -> Member:
        """Move the slot of a key to another master the way resharding tools do, key by key. Returns the new owner."""
        with self.moving(key) as target:
            return target

    def migrate_at_once(self, key: str) -> Member:
        """Move it as Valkey 9 does: the slot is copied while it is served, and its owner changes in one step."""
        slot, source = slot_of(key), self.owner(key)
        target = next(master for master in self.masters if master is not source)
        try:
            source.ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.id)
        except redis.ResponseError:
            return self.migrate(key)  # an older server, chosen by SERVER_BINARY
        wait_until(lambda: self.owner(key) is target, f"slot {slot} has moved")
        return target

    @contextmanager
    def moving(self, key: str, only: Sequence[str] = ()) -> Iterator[Member]:
        """The same, but the block runs when the existing keys have moved, or `only` these of them, and the slot still
        has its old owner."""
        slot, source = slot_of(key), self.owner(key)
        target = next(master for master in self.masters if master is not source)
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
        try:
            if only:
                source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *only)
            else:
                self._carry(slot, source, target)
            yield target
        finally:
            self._carry(slot, source, target)
            for master in (target, source, *self.masters):
                master.ask("CLUSTER", "SETSLOT", slot, "NODE", target.id)

    def _carry(self, slot: int, source: Member, target: Member) -> None:
        while names := source.ask("CLUSTER", "GETKEYSINSLOT", slot, PAGE):
            source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names)
