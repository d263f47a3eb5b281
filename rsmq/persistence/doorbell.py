"""The doorbell wakes sessions over sharded pub/sub. A ring may bring the next letter of an MQTT client along."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import anyio
import anyio.abc

from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError
from rsmq.model.backoff import Backoff
from rsmq.redis.client.connector import Client
from rsmq.redis.client.raw_connection import RawConnection, pack

log = logging.getLogger("rsmq.doorbell")

PING_EVERY: Final = 5.0
SILENCE: Final = 15.0
"""No pong for so many seconds: the connection is half open."""
PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 2.0

Ring = Callable[[], None]
Push = Callable[[bytes], bool]
"""Takes what has come along with a ring. Returns False if it cannot: it is as any other ring then."""


class NodeSubscription:
    """One connection that subscribes to channels of one node, until it breaks."""

    def __init__(self, node: Client, rung: Callable[[bytes, bytes], None]) -> None:
        self._connection = RawConnection(node)
        self._rung = rung
        self.channels: set[bytes] = set()
        self._leaving: dict[bytes, int] = {}
        self._outgoing: list[bytes] = []
        self._wake = asyncio.Event()

    def listen(self, channel: bytes) -> None:
        """Subscribe to a channel; it rings when the server has confirmed the subscription."""
        self.channels.add(channel)
        self.send(b"SSUBSCRIBE", channel)

    def forget(self, channel: bytes) -> None:
        """Unsubscribe from a channel."""
        self.channels.discard(channel)
        self._leaving[channel] = self._leaving.get(channel, 0) + 1
        self.send(b"SUNSUBSCRIBE", channel)

    def send(self, *command: bytes) -> None:
        """Write another command. Its answer is read, and is no ring."""
        self._outgoing.append(pack(command))
        self._wake.set()

    async def run(self) -> None:
        """Run until the connection breaks or a channel has moved to another node: both raise BrokerUnavailable."""
        try:
            await self._connection.open()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write)
                tasks.start_soon(self._ping)
                await self._read()
        except BaseExceptionGroup as group:
            broken, other = group.split(BrokerError)
            if other is not None:
                raise other from None
            raise BrokerUnavailable(str(broken.exceptions[0]) if broken else "the connection broke") from None
        finally:
            with anyio.CancelScope(shield=True):
                await self._connection.close()

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            outgoing, self._outgoing = self._outgoing, []
            await self._connection.send(outgoing)

    async def _ping(self) -> None:
        while True:
            await anyio.sleep(PING_EVERY)
            self._connection.check_server()
            self.send(b"PING")

    async def _read(self) -> None:
        while True:
            for reply in await self._connection.receive_arrived(SILENCE):
                if isinstance(reply, Exception):
                    raise reply if isinstance(reply, BrokerError) else BrokerUnavailable(str(reply))
                if reply[0] == b"smessage":
                    self._rung(reply[1], reply[2])
                elif reply[0] == b"ssubscribe":
                    self._rung(reply[1], b"")
                elif reply[0] == b"sunsubscribe":
                    self._left(reply[1])

    def _left(self, channel: bytes) -> None:
        """The server ended a subscription: by `forget` (perhaps subscribed again since), or as its slot moved."""
        asked = self._leaving.pop(channel, 0)
        if asked > 1:
            self._leaving[channel] = asked - 1
        elif not asked and channel in self.channels:
            raise BrokerUnavailable("a slot has moved to another node")


class Doorbell:
    """The subscriptions of all sessions of this process.

    After a broken connection or a moved slot a ring may have been missed, so every affected channel rings.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._rings: dict[bytes, list[tuple[Ring, Push | None]]] = {}
        self._subscriptions: dict[Client, NodeSubscription] = {}
        self._tasks: anyio.abc.TaskGroup | None = None
        self._backoff = Backoff(PAUSE, LONGEST_PAUSE)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled."""
        try:
            async with anyio.create_task_group() as self._tasks:
                task_status.started()
                await anyio.sleep_forever()
        finally:
            self._tasks = None
            for channel in list(self._rings):  # waiting sessions find out that the broker is closed
                self._rung(channel, b"")

    def listen(self, channel: str, ring: Ring, push: Push | None = None) -> None:
        """Call `ring` whenever there may be a new letter, first when the subscription is confirmed.

        `push` gets what comes along with a ring; if it takes that, `ring` is not called.
        """
        if self._tasks is None:
            raise ConfigError("the broker is not connected: open the session inside `async with broker:`")
        rings = self._rings.setdefault(channel.encode(), [])
        rings.append((ring, push))
        if len(rings) == 1:
            self._subscription(channel).listen(channel.encode())

    def forget(self, channel: str, ring: Ring) -> None:
        """Stop calling `ring`."""
        rings = self._rings.get(channel.encode(), [])
        at = next((at for at, each in enumerate(rings) if each[0] == ring), None)
        if at is not None:
            del rings[at]
            if not rings:
                del self._rings[channel.encode()]
                for subscription in self._subscriptions.values():  # of all nodes: its slot may have moved
                    if channel.encode() in subscription.channels:
                        subscription.forget(channel.encode())

    def _subscription(self, channel: str) -> NodeSubscription:
        """The subscription connection to the node of a channel, opened on first use."""
        node = self._client.node_for(channel)
        subscription = self._subscriptions.get(node)
        if subscription is None:
            assert self._tasks is not None, "listening needs a running doorbell"
            subscription = self._subscriptions[node] = NodeSubscription(node, self._rung)
            self._tasks.start_soon(self._keep, node, subscription)
        return subscription

    async def _keep(self, node: Client, subscription: NodeSubscription) -> None:
        """Run a connection; when it breaks, subscribe to its channels again, on the nodes that have them by then."""
        try:
            await subscription.run()
        except BrokerError as error:
            log.info("the doorbell connection was interrupted: %s", error)
        await anyio.sleep(self._backoff.next())
        try:
            await self._client.refresh()
        except BrokerError as error:
            log.info("the doorbell cannot look up the cluster's nodes: %s", error)
        del self._subscriptions[node]
        for channel in subscription.channels:
            if channel in self._rings:
                self._subscription(channel.decode()).listen(channel)

    def _rung(self, channel: bytes, pushed: bytes) -> None:
        self._backoff.reset()
        for ring, push in self._rings.get(channel, ()):
            if not (pushed and push is not None and push(pushed)):
                ring()

    def __repr__(self) -> str:
        return f"<Doorbell channels={len(self._rings)} connections={len(self._subscriptions)}>"
