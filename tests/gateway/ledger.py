"""Clients that go on wherever they can connect, and remember what they sent and got: the ledger of the kill tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.gateway import packets as p
from tests.gateway.raw_client import RawClient

BROKEN = (asyncio.IncompleteReadError, OSError, TimeoutError, AssertionError)
PAUSE = 0.05


class Roamer:
    """A client with a persistent session of version 3.1.1, on any of these ports."""

    def __init__(self, ports: Sequence[int], client_id: str, first: int = 0) -> None:
        self.ports, self.client_id, self._turn = list(ports), client_id, first
        self.connects = 0
        self.port_now = 0
        """The gateway that it has connected to last."""

    async def connected(self) -> RawClient:
        """A connection to the next gateway that accepts one."""
        while True:
            self.port_now = self.ports[self._turn % len(self.ports)]
            one = RawClient(self.port_now)
            self._turn += 1
            try:
                await one.connect(self.client_id, clean=False)
            except BROKEN:
                await asyncio.sleep(PAUSE)
                continue
            assert one.connack is not None
            if one.connack.reason == 0:
                self.connects += 1
                return one
            one.abort()


class Publisher(Roamer):
    """Publishes messages in order, with several in flight, and again until they are acknowledged."""

    window = 8

    async def publish(self, topic: str, payloads: list[bytes], qos: int) -> None:
        """Return when all are acknowledged."""
        waiting = list(enumerate(payloads, 1))
        out: dict[int, bytes] = {}
        released: set[int] = set()
        while waiting or out:
            one = await self.connected()
            try:
                for packet_id, payload in list(out.items()):
                    if packet_id in released:
                        one.send(p.ack(6, packet_id))
                    else:
                        one.send(p.publish(topic, payload, qos, packet_id, dup=True))
                while waiting or out:
                    while waiting and len(out) < self.window:
                        packet_id, payload = waiting.pop(0)
                        out[packet_id] = payload
                        one.send(p.publish(topic, payload, qos, packet_id))
                    got = await one.take()
                    if got.kind == 5 and got.packet_id in out:
                        released.add(got.packet_id)
                        one.send(p.ack(6, got.packet_id))
                    elif got.kind in (4, 7):
                        out.pop(got.packet_id, None)
            except BROKEN:
                one.abort()
                continue
            await one.disconnect()


class Subscriber(Roamer):
    """Gets messages until it has as many different ones as it wants. `got` has all of them, repetitions too."""

    def __init__(self, ports: Sequence[int], client_id: str, first: int = 0) -> None:
        super().__init__(ports, client_id, first)
        self.got: list[bytes] = []
        self.ready = asyncio.Event()

    def received(self, payload: bytes) -> None:
        """A message has come, perhaps again."""
        self.got.append(payload)

    async def collect(self, topic: str, count: int, qos: int) -> None:
        """Subscribe once, then acknowledge what comes."""
        held: set[int] = set()
        while len(set(self.got)) < count:
            one = await self.connected()
            try:
                if not self.ready.is_set():
                    await one.subscribe((topic, qos))
                    self.ready.set()
                while len(set(self.got)) < count:
                    got = await one.take()
                    if got.kind == 3 and got.qos == 1:
                        self.received(got.payload)
                        one.send(p.ack(4, got.packet_id))
                    elif got.kind == 3 and got.qos == 2:
                        if got.packet_id not in held:
                            held.add(got.packet_id)
                            self.received(got.payload)
                        one.send(p.ack(5, got.packet_id))
                    elif got.kind == 6:
                        held.discard(got.packet_id)
                        one.send(p.ack(7, got.packet_id))
            except BROKEN:
                pass
            one.abort()


def firsts(got: list[bytes]) -> list[bytes]:
    """What came, each at its first time."""
    return list(dict.fromkeys(got))
