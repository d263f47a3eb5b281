"""Leases: a member's exclusive right to a partition, held only as long as the local clock allows."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any, Final

from rsmq.errors import BrokerUnavailable
from rsmq.heartbeat.registration import longer_leases
from rsmq.model.clock import monotonic, to_ms
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings, lease_margin
from rsmq.redis.client.connector import Client
from rsmq.redis.client.raw_connection import kill_command
from rsmq.redis.pubsub import listeners
from rsmq.redis.scripts import OK, RELEASE_LEASE, RENEW_LEASE, RENEW_PERMITS, TAKE_LEASE, UNKNOWN, Value

log = logging.getLogger("rsmq.lease")

OVER: Final = float("-inf")


class Lease:
    """One grant of a partition. The event loop checks it, the heartbeat thread renews it.

    Invariant: `deadline` (monotonic) is the start of the last confirmed renewal + ttl - margin, so it passes before the
    server grants the partition to another member. A lost lease is never held again: a new grant is a new object.
    """

    __slots__ = ("deadline", "epoch", "group", "is_lost", "key", "newer", "owner", "partition", "run", "topic")

    def __init__(
        self, topic: str, group: str, partition: int, key: str, owner: str, epoch: str, deadline: float, run: int = 0
    ) -> None:
        self.topic = topic
        self.group = group
        self.partition = partition
        self.key = key
        self.owner = owner
        self.epoch = epoch
        self.deadline = deadline
        self.run = run
        self.is_lost = False
        self.newer = 0

    @classmethod
    def shared(cls, topic: str, group: str, partition: int, owner: str, deadline: float) -> Lease:
        """Shared distribution: not exclusive; it says how long messages in flight belong to this member."""
        return cls(topic, group, partition, "", owner, "", deadline)

    def is_held(self) -> bool:
        """Whether work may go on."""
        return monotonic() < self.deadline

    def renewal(self, ttl_ms: int) -> tuple[Value, ...]:
        """The command that renews it."""
        return RENEW_LEASE.command((self.key,), (self.owner, self.epoch, ttl_ms))

    def prolong(self, deadline: float) -> None:
        """A renewal was confirmed. It does not revive a lease that is lost or has run out by the local clock."""
        if not self.is_lost and self.is_held():
            self.deadline = deadline
            if self.is_lost:  # lost by the other thread in between
                self.deadline = OVER

    def bind(self, before: Sequence[Lease]) -> None:
        """End with these, too. Only a lease that was taken for that can."""
        if before:
            raise TypeError("this lease was not taken as one that follows others")

    def lose(self) -> None:
        """End it for good."""
        self.is_lost = True
        self.deadline = OVER

    def give_up(self, newer: int) -> None:
        """A store knows an owner with the epoch `newer`: this lease counts no more, and the next one must be above."""
        self.newer = max(self.newer, newer)
        self.lose()

    def __repr__(self) -> str:
        left = "lost" if self.is_lost else f"{self.deadline - monotonic():.1f} s left"
        return f"<Lease {self.topic}.{self.partition}/{self.group} epoch={self.epoch} {left}>"


class FollowingLease(Lease):
    """The lease of a partition that follows others in a resize. While it is bound to theirs, it counts no longer than
    the first of them to end."""

    __slots__ = ("_before", "_own")

    def __init__(self, *args: Any, **options: Any) -> None:
        self._before: tuple[Lease, ...] = ()
        super().__init__(*args, **options)

    @property
    def deadline(self) -> float:
        """When it ends, with those that it is bound to."""
        return min(self._own, *[each.deadline for each in self._before]) if self._before else self._own

    @deadline.setter
    def deadline(self, deadline: float) -> None:
        self._own = deadline

    def bind(self, before: Sequence[Lease]) -> None:
        """It ends with these; without any, it counts alone."""
        self._before = tuple(before)


class PermitLease(Lease):
    """How long the permits count that a member holds in a group: they end with it."""

    __slots__ = ()

    def __init__(self, topic: str, group: str, key: str, owner: str, token: int, deadline: float) -> None:
        super().__init__(topic, group, -1, key, owner, str(token), deadline)

    def renewal(self, ttl_ms: int) -> tuple[Value, ...]:
        """The command that renews it."""
        return RENEW_PERMITS.command((self.key,), (self.owner, self.epoch, ttl_ms))

    def __repr__(self) -> str:
        return f"<PermitLease {self.topic}/{self.group} token={self.epoch}>"


class Leases:
    """Takes and releases the leases of one member; the heartbeat renews them."""

    def __init__(self, client: Client, keys: Keys, settings: Settings, member: str) -> None:
        self._client = client
        self._keys = keys
        self._settings = settings
        self._member = member
        self._warned = False

    async def take(
        self,
        topic: str,
        partition: int,
        group: str,
        *,
        reader: str,
        absent: Collection[str] = (),
        above: int = 0,
        is_following: bool = False,
    ) -> Lease | None:
        """A new grant, or None while another member holds it. The lease of a member in `absent` may be taken early.

        Its epoch is greater than `above`, which a store knows. `is_following`: it may be bound to others.
        """
        key, stream = self._keys.lease(topic, partition, group), self._keys.stream(topic, partition)
        ttl = self._settings.lease_ttl
        args = (self._member, to_ms(ttl), reader)
        started = monotonic()
        reply = await TAKE_LEASE(self._client, (key, stream), (*args, "", "", group, "", above))
        if reply[0] == UNKNOWN:  # rare: the record was deleted, and its owner may believe in it for its own lease
            leases = await longer_leases(self._client, self._keys, topic, group, to_ms(ttl))
            longest = max(to_ms(ttl), *leases.values(), 0)
            reply = await TAKE_LEASE(self._client, (key, stream), (*args, "", "", group, longest, above))
        if reply[0] != OK and reply[1].decode(errors="replace") in absent:
            owner = reply[1].decode(errors="replace")
            channel = self._keys.presence(owner)
            if self._client.is_cluster:  # the channel is on another node: the script cannot check it
                if any(await listeners(self._client, [channel])):
                    return None
                channel = ""
            started = monotonic()
            reply = await TAKE_LEASE(self._client, (key, stream), (*args, owner, channel, group, "", above))
        if reply[0] != OK:
            return None
        await self._cut_off(key, reply[3].decode(errors="replace").splitlines())
        deadline = started + (ttl - lease_margin(self._settings)).total_seconds()
        kind = FollowingLease if is_following else Lease
        return kind(topic, group, partition, key, self._member, reply[1].decode(), deadline, int(reply[4]))

    async def _cut_off(self, key: str, readers: list[str]) -> None:
        """Close the reading connections of former owners: their late reads must not receive any more messages.

        The connections are on the node that holds the partition. On another node they can read nothing: a slot that has
        moved is refused.
        """
        replies = await self._client.node_for(key).pipelined([kill_command(reader) for reader in readers])
        refused = next((reply for reply in replies if isinstance(reply, Exception)), None)
        if isinstance(refused, BrokerUnavailable):
            raise refused
        if refused is not None and not self._warned:
            log.warning("cannot cut off the last owner's reader; its late reads are taken over later: %s", refused)
            self._warned = True

    async def release(self, lease: Lease, late_reader: str = "") -> None:
        """Release it if this member still holds it, and delete this member's consumer.

        `late_reader`: the connection with a read that may still be on its way. The next owner cuts it off.
        """
        stream = self._keys.stream(lease.topic, lease.partition)
        await RELEASE_LEASE(self._client, (lease.key, stream), (lease.owner, lease.epoch, lease.group, late_reader))
