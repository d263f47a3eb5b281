"""Leases: a member's exclusive right to a partition, believed only as long as the local clock allows."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from rsmq.clock import monotonic, to_ms
from rsmq.connect import Client
from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError
from rsmq.heartbeat.presence import listeners
from rsmq.keys import Keys
from rsmq.script import OK, RELEASE_LEASE, TAKE_LEASE
from rsmq.settings import Settings

log = logging.getLogger("rsmq.lease")

OVER: Final = float("-inf")


class Lease:
    """One grant. Shared by the event loop, which believes in it, and the beat's thread, which renews it.

    Invariant: `deadline` (monotonic) is the start of the last confirmed renewal + ttl - margin, so it passes before the
    server gives the partition away. Once lost it is never held again: a new grant is a new object.
    """

    __slots__ = ("deadline", "epoch", "group", "is_lost", "key", "owner", "partition", "topic")

    def __init__(
        self, topic: str, group: str, partition: int, key: str, owner: str, epoch: str, deadline: float
    ) -> None:
        self.topic, self.group, self.partition, self.key = topic, group, partition, key
        self.owner, self.epoch, self.deadline = owner, epoch, deadline
        self.is_lost = False

    @classmethod
    def shared(cls, topic: str, group: str, partition: int, owner: str, deadline: float) -> Lease:
        """Shared distribution: no exclusive right, only the belief that what is in hand is still ours."""
        return cls(topic, group, partition, "", owner, "", deadline)

    def is_held(self) -> bool:
        """Whether work may go on."""
        return monotonic() < self.deadline

    def prolong(self, deadline: float) -> None:
        """A renewal was confirmed. Without effect on a lease that is lost or has already run out here."""
        if not self.is_lost and self.is_held():
            self.deadline = deadline
            if self.is_lost:  # lost by the other thread in between
                self.deadline = OVER

    def lose(self) -> None:
        """Stop believing in it, for good."""
        self.is_lost = True
        self.deadline = OVER

    def __repr__(self) -> str:
        left = "lost" if self.is_lost else f"{self.deadline - monotonic():.1f} s left"
        return f"<Lease {self.topic}.{self.partition}/{self.group} epoch={self.epoch} {left}>"


class Leases:
    """Takes and releases the leases of one member; renewing is the beat's."""

    def __init__(self, client: Client, keys: Keys, settings: Settings, member: str) -> None:
        self._client, self._keys, self._settings, self._member = client, keys, settings, member
        self._warned = False

    async def take(
        self, topic: str, partition: int, group: str, *, reader: str, absent: Collection[str] = ()
    ) -> Lease | None:
        """A new grant, or None while another member holds it. The lease of a member in `absent` may be taken early."""
        key, stream = self._keys.lease(topic, partition, group), self._keys.stream(topic, partition)
        ttl = self._settings.lease_ttl
        args = (self._member, to_ms(ttl), reader)
        started = monotonic()
        reply = await TAKE_LEASE(self._client, (key, stream), (*args, "", "", group))
        if reply[0] != OK and reply[1].decode() in absent:
            owner = reply[1].decode()
            channel = self._keys.presence(owner)
            if self._client.is_cluster:  # the channel is on another node: the script cannot look there
                if any(await listeners(self._client, [channel])):
                    return None
                channel = ""
            started = monotonic()
            reply = await TAKE_LEASE(self._client, (key, stream), (*args, owner, channel, group))
        if reply[0] != OK:
            return None
        await self._cut_off(key, reply[3].decode())
        deadline = started + (ttl - self._settings.lease_margin).total_seconds()
        return Lease(topic, group, partition, key, self._member, reply[1].decode(), deadline)

    async def _cut_off(self, key: str, reader: str) -> None:
        """End the previous owner's reading connection: what it still has in the air must not be delivered to it.

        It is on the node that holds the partition, or it can read nothing of it any more: a slot that has moved is
        refused. Both id and address must match, so that after a restart of the server nobody else's connection is hit.
        """
        client_id, _, address = reader.partition(" ")
        if not client_id:
            return
        try:
            await self._client.node_for(key).execute_command("CLIENT", "KILL", "ID", client_id, "ADDR", address)
        except BrokerUnavailable:
            raise
        except (BrokerError, ConfigError) as error:
            if not self._warned:
                log.warning("the last owner's reader cannot be cut off, its phantoms are found later: %s", error)
                self._warned = True

    async def release(self, lease: Lease) -> None:
        """Give it back, if it is still ours, and with it our consumer."""
        stream = self._keys.stream(lease.topic, lease.partition)
        await RELEASE_LEASE(self._client, (lease.key, stream), (lease.owner, lease.epoch, lease.group))
