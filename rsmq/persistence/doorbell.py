"""The doorbell: tells sessions that something has come, over sharded pub/sub, without any data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

import anyio
import anyio.abc

from rsmq.connect import Client
from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError
from rsmq.wire import Wire, pack

log = logging.getLogger("rsmq.doorbell")

PING_EVERY: Final = 5.0
SILENCE: Final = 15.0
"""No pong for so many seconds: the connection is half open."""
PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 2.0

Ring = Callable[[], None]


class Strand:
    """One connection that listens to the channels of one node, until it breaks."""

    def __init__(self, node: Client, rung: Callable[[bytes], None]) -> None:
        self._wire, self._rung = Wire(node), rung
        self.channels: set[bytes] = set()
        self._leaving: dict[bytes, int] = {}
        self._outgoing: list[bytes] = []
        self._wake = anyio.Event()

    def listen(self, channel: bytes) -> None:
        """Also listen to a channel; it rings once when the server has confirmed."""
        self.channels.add(channel)
        self._send(b"SSUBSCRIBE", channel)

    def forget(self, channel: bytes) -> None:
        """Listen to it no more."""
        self.channels.discard(channel)
        self._leaving[channel] = self._leaving.get(channel, 0) + 1
        self._send(b"SUNSUBSCRIBE", channel)

    def _send(self, *command: bytes) -> None:
        self._outgoing.append(pack(command))
        self._wake.set()

    async def run(self) -> None:
        """Serve until the connection breaks (BrokerError) or a channel has moved to another node."""
        try:
            await self._wire.open()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write)
                await self._read()
        except BaseExceptionGroup as group:
            broken, other = group.split(BrokerError)
            if other is not None:
                raise other from None
            raise BrokerUnavailable(str(broken.exceptions[0]) if broken else "the doorbell broke") from None
        finally:
            with anyio.CancelScope(shield=True):
                await self._wire.close()

    async def _write(self) -> None:
        while True:
            with anyio.move_on_after(PING_EVERY):
                await self._wake.wait()
            self._wake = anyio.Event()
            outgoing, self._outgoing = self._outgoing or [pack(("PING",))], []
            await self._wire.send(outgoing)

    async def _read(self) -> None:
        while True:
            reply = (await self._wire.receive(1, SILENCE))[0]
            if isinstance(reply, Exception):
                raise reply if isinstance(reply, BrokerError) else BrokerUnavailable(str(reply))
            if reply[0] in (b"smessage", b"ssubscribe"):
                self._rung(reply[1])
            elif reply[0] == b"sunsubscribe":
                self._left(reply[1])

    def _left(self, channel: bytes) -> None:
        """A subscription has ended: as it was asked for, even if somebody is here again, or because its slot moved."""
        asked = self._leaving.pop(channel, 0)
        if asked > 1:
            self._leaving[channel] = asked - 1
        elif not asked and channel in self.channels:
            raise BrokerUnavailable("a slot has moved to another node")


class Doorbell:
    """Holds the subscriptions of all sessions of this process.

    A ring says no more than "look". Whenever one may have been missed (a broken connection, a moved slot), it rings.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._rings: dict[bytes, list[Ring]] = {}
        self._strands: dict[Client, Strand] = {}
        self._tasks: anyio.abc.TaskGroup | None = None
        self._pause = PAUSE

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled."""
        try:
            async with anyio.create_task_group() as self._tasks:
                task_status.started()
                await anyio.sleep_forever()
        finally:
            self._tasks = None
            for channel in list(self._rings):  # whoever waits finds out that the broker is closed
                self._rung(channel)

    def listen(self, channel: str, ring: Ring) -> None:
        """Call `ring` whenever there may be something new, first when the subscription is confirmed."""
        if self._tasks is None:
            raise ConfigError("the broker is not connected: open the session inside `async with broker:`")
        rings = self._rings.setdefault(channel.encode(), [])
        rings.append(ring)
        if len(rings) == 1:
            self._strand(channel).listen(channel.encode())

    def forget(self, channel: str, ring: Ring) -> None:
        """Do not call it any more."""
        rings = self._rings.get(channel.encode(), [])
        if ring in rings:
            rings.remove(ring)
            if not rings:
                del self._rings[channel.encode()]
                for strand in self._strands.values():  # not only where the channel is now: its slot may have moved
                    if channel.encode() in strand.channels:
                        strand.forget(channel.encode())

    def _strand(self, channel: str) -> Strand:
        """The connection to the node of a channel, made on first use."""
        node = self._client.node_for(channel)
        strand = self._strands.get(node)
        if strand is None:
            assert self._tasks is not None, "nobody listens before or after"
            strand = self._strands[node] = Strand(node, self._rung)
            self._tasks.start_soon(self._keep, node, strand)
        return strand

    async def _keep(self, node: Client, strand: Strand) -> None:
        """Run a connection; when it breaks, its channels are listened to anew, wherever they are by then."""
        try:
            await strand.run()
        except BrokerError as error:
            log.info("the doorbell is interrupted: %s", error)
        await anyio.sleep(self._pause)
        self._pause = min(LONGEST_PAUSE, self._pause * 2)
        try:
            await self._client.refresh()
        except BrokerError as error:
            log.info("the servers are unknown: %s", error)
        del self._strands[node]
        self._again(strand.channels)

    def _again(self, channels: Iterable[bytes]) -> None:
        for channel in channels:
            if channel in self._rings:
                self._strand(channel.decode()).listen(channel)

    def _rung(self, channel: bytes) -> None:
        self._pause = PAUSE
        for ring in self._rings.get(channel, ()):
            ring()

    def __repr__(self) -> str:
        return f"<Doorbell channels={len(self._rings)} connections={len(self._strands)}>"
