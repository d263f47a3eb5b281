"""The load of `benchmarks.gateway`, in a process of its own: `python -m benchmarks.mqtt_load WORK PORT '{...}'`.

MQTT 3.1.1 written and read with as little work as possible, so that the broker is the bottleneck. It prints `begin`
when all clients are ready, waits for a line, does its work, and prints what it has seen as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

PAYLOAD: Final = 200
TICK: Final = 0.005


def text(value: str) -> bytes:
    """A string with its length."""
    return len(value).to_bytes(2, "big") + value.encode()


def packet(head: int, body: bytes) -> bytes:
    """A packet with its length."""
    size, length = len(body), bytearray()
    while True:
        size, low = divmod(size, 128)
        length.append(low | (128 if size else 0))
        if not size:
            return bytes([head]) + bytes(length) + body


class Client(asyncio.Protocol):
    """One connection. `on_ack` gets packet ids of PUBACKs, `on_message` payloads."""

    def __init__(self, client_id: str, *, clean: bool) -> None:
        self.client_id, self._clean = client_id, clean
        self._buffer = b""
        self._answers = deque[asyncio.Future[bytes]]()
        self.on_ack: Callable[[Client, int], None] = lambda _client, _id: None
        self.on_message: Callable[[bytes], None] = lambda _payload: None
        self.next_id = 0
        self.sent_at: dict[int, float] = {}
        self.topic = b""
        self.delay = 0.0
        self.is_closed = self.is_silent = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        self.is_closed = True
        for each in self._answers:
            if not each.done():
                each.set_exception(ConnectionError("closed"))

    async def open(self, port: int) -> Client:
        """Connect, and wait for the CONNACK."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, "127.0.0.1", port)
        await self.ask(self.first_packet)
        return self

    @property
    def first_packet(self) -> bytes:
        """Its CONNECT."""
        return packet(0x10, text("MQTT") + bytes([4, 2 if self._clean else 0, 0, 0]) + text(self.client_id))

    async def subscribe(self, topic: str) -> None:
        """Subscribe at QoS 1, and wait for the SUBACK."""
        await self.ask(packet(0x82, b"\0\1" + text(topic) + b"\1"))

    def ask(self, data: bytes) -> asyncio.Future[bytes]:
        """Send a packet that has one answer."""
        answer = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self._transport.write(data)
        return answer

    def publish(self) -> None:
        """Publish at QoS 1; the payload begins with the time."""
        self.next_id = self.next_id % 65_535 + 1
        now = time.monotonic()
        self.sent_at[self.next_id] = now
        payload = b"%020.9f" % now + bytes(PAYLOAD - 20)
        body = self.topic + self.next_id.to_bytes(2, "big") + payload
        self._transport.write(b"\x32" + self._length + body)

    def to(self, topic: str) -> Client:
        """Publish to this topic from now on."""
        self.topic = text(topic)
        size = len(self.topic) + 2 + PAYLOAD
        self._length = bytes([size % 128 | 128, size // 128])
        return self

    def data_received(self, data: bytes) -> None:
        data = self._buffer + data if self._buffer else data
        at, end, acks = 0, len(data), []
        while end - at >= 2:
            size, shift, middle = data[at + 1] & 127, 7, at + 2
            while data[middle - 1] & 128:
                if middle >= end:
                    break
                size |= (data[middle] & 127) << shift
                shift, middle = shift + 7, middle + 1
            if data[middle - 1] & 128 or end - middle < size:
                break
            kind = data[at] >> 4
            if kind == 4:
                self.on_ack(self, data[middle] << 8 | data[middle + 1])
            elif kind == 3:
                start = middle + 2 + (data[middle] << 8 | data[middle + 1])
                if data[at] & 6:
                    if not self.is_silent:
                        acks.append(b"\x40\2" + data[start : start + 2])
                    start += 2
                self.on_message(data[start : middle + size])
            elif kind in (2, 9):
                self._answers.popleft().set_result(data[middle : middle + size])
            at = middle + size
        self._buffer = data[at:]
        if acks and self.delay:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(self.delay * len(acks), self._acknowledge, b"".join(acks))
        elif acks:
            self._transport.write(b"".join(acks))

    def _acknowledge(self, data: bytes) -> None:
        if not self.is_closed:
            self._transport.write(data)
            self._transport.resume_reading()

    def close(self) -> None:
        """Without a DISCONNECT."""
        self._transport.abort()


def ready() -> None:
    """All clients are connected: wait for the start."""
    print("begin", flush=True)
    sys.stdin.readline()


async def opened(port: int, name: str, count: int, *, clean: bool, topic: str = "") -> list[Client]:
    """So many clients, with a subscription to the topic with their number."""
    found = list[Client]()
    for first in range(0, count, 50):
        page = [Client(f"{name}{n}", clean=clean) for n in range(first, min(count, first + 50))]
        await asyncio.gather(*(each.open(port) for each in page))
        if topic:
            await asyncio.gather(*(each.subscribe(topic.format(first + n)) for n, each in enumerate(page)))
        found += page
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median and 99th percentile, in milliseconds."""
    values.sort()
    if not values:
        return {"p50": 0.0, "p99": 0.0}
    return {"p50": values[len(values) // 2] * 1000, "p99": values[int(len(values) * 0.99)] * 1000}


class Flow:
    """Publishers that send `count` messages together: as fast as acknowledged (`window` each), or `rate` a second."""

    def __init__(
        self, publishers: list[Client], count: int, expected: int, *, window: int = 10, rate: float = 0
    ) -> None:
        self._publishers, self.left, self._window, self._rate = publishers, count, window, rate
        self.count, self.expected = count, expected
        self.acked = self.got = 0
        self.ack_times, self.end_times = list[float](), list[float]()
        self.done = asyncio.get_running_loop().create_future()
        for each in publishers:
            each.on_ack = self._acked

    def received(self, payload: bytes) -> None:
        """A subscriber has got a message."""
        self.got += 1
        self.end_times.append(time.monotonic() - float(payload[:20]))
        self._check()

    def _acked(self, client: Client, packet_id: int) -> None:
        self.acked += 1
        self.ack_times.append(time.monotonic() - client.sent_at.pop(packet_id))
        if self.left > 0 and not self._rate:
            self.left -= 1
            client.publish()
        self._check()

    def _check(self) -> None:
        if self.acked >= self.count and self.got >= self.expected and not self.done.done():
            self.done.set_result(None)

    async def run(self, seconds: float = 300) -> dict[str, Any]:
        """Everything is acknowledged and received, or the time is over."""
        started = time.monotonic()
        if self._rate:
            await self._paced()
        else:
            for each in self._publishers:
                for _ in range(min(self._window, self.left)):
                    self.left -= 1
                    each.publish()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.done), seconds)
        return {
            "seconds": time.monotonic() - started, "acked": self.acked, "got": self.got,
            "puback": spread(self.ack_times), "end_to_end": spread(self.end_times),
        }  # fmt: skip

    async def _paced(self) -> None:
        start, sent, turn = time.monotonic(), 0, 0
        while sent < self.count:
            wanted = min(self.count, int((time.monotonic() - start) * self._rate))
            for _ in range(wanted - sent):
                self._publishers[turn % len(self._publishers)].publish()
                turn += 1
            sent = max(sent, wanted)
            await asyncio.sleep(TICK)


async def ingest(port: int, given: dict[str, Any]) -> dict[str, Any]:
    """Devices publish to a topic that no MQTT client reads."""
    clients = await opened(port, "i", given["clients"], clean=True)
    for n, each in enumerate(clients):
        each.to(f"ingest/{n}")
    ready()
    return await Flow(clients, given["count"], 0, rate=given.get("rate", 0)).run()


async def pairs(port: int, given: dict[str, Any]) -> dict[str, Any]:
    """Half of the clients publish, each to one of the others, whose session is kept."""
    half = given["clients"] // 2
    readers = await opened(port, "r", half, clean=False, topic="p2p/{}")
    writers = await opened(port, "w", half, clean=True)
    for n, each in enumerate(writers):
        each.to(f"p2p/{n}")
    ready()
    flow = Flow(writers, given["count"], given["count"], rate=given.get("rate", 0))
    for each in readers:
        each.on_message = flow.received
    return await flow.run()


async def fan(port: int, given: dict[str, Any]) -> dict[str, Any]:
    """One client publishes to all others."""
    clean = given["clean"]
    readers = await opened(port, f"f{int(clean)}", given["clients"], clean=clean, topic="fan")
    (writer,) = await opened(port, "fw", 1, clean=True)
    ready()
    flow = Flow([writer.to("fan")], given["count"], given["count"] * len(readers))
    for each in readers:
        each.on_message = flow.received
    return await flow.run()


async def connects(port: int, given: dict[str, Any]) -> dict[str, Any]:
    """Clients with kept sessions connect and subscribe, and stay until the next line."""
    ready()
    started = time.monotonic()
    await opened(port, "c", given["count"], clean=False, topic="own/{}")
    seconds = time.monotonic() - started
    print(json.dumps({"seconds": seconds}), flush=True)
    sys.stdin.readline()
    return {}


async def single(port: int, given: dict[str, Any]) -> dict[str, Any]:
    """One message at a time, each from one client to another: the next one a millisecond after it was received.

    So no message shares a write, a read or a call with another one, however busy the machine is.
    """
    half = given["clients"] // 2
    readers = await opened(port, "r", half, clean=False, topic="p2p/{}")
    writers = await opened(port, "w", half, clean=True)
    received = asyncio.Event()
    for n, (reader, writer) in enumerate(zip(readers, writers, strict=True)):
        reader.on_message = lambda _: received.set()
        writer.to(f"p2p/{n}")
    ready()
    started = time.monotonic()
    for n in range(given["count"]):
        received.clear()
        writers[n % half].publish()
        await received.wait()
        await asyncio.sleep(0.001)
    return {"seconds": time.monotonic() - started}


async def absent(port: int, given: dict[str, Any]) -> dict[str, Any]:
    """Messages for a client that is away; the broker is killed at `begin`, and started again."""
    (reader,) = await opened(port, "away", 1, clean=False, topic="away")
    reader.close()
    (writer,) = await opened(port, "aw", 1, clean=True)
    flow = Flow([writer.to("away")], given["count"], 0)
    result = await flow.run()
    ready()
    back, got = Client("away0", clean=False), list[bytes]()
    last = time.monotonic()

    def received(payload: bytes) -> None:
        nonlocal last
        got.append(payload[:20])
        last = time.monotonic()

    back.on_message = received
    opening = time.monotonic()
    await back.open(port)
    while len(got) < given["count"] and time.monotonic() - last < 15:
        await asyncio.sleep(0.01)
    return {"acked": result["acked"], "delivered": len(set(got)), "in_order": got == sorted(got),
            "seconds": last - opening}  # fmt: skip


async def resume(port: int, given: dict[str, Any]) -> dict[str, Any]:
    """A client with many messages waiting connects again and again: how long until the first one comes.

    It acknowledges nothing, so that they all wait again. `port` and the next one are two brokers of one fleet, in turn.
    """
    (reader,) = await opened(port, "back", 1, clean=False, topic="back")
    reader.close()
    (writer,) = await opened(port, "bw", 1, clean=True)
    await Flow([writer.to("back")], given["count"], 0, window=50).run()
    ready()
    times = list[float]()
    for turn in range(given["times"]):
        first = asyncio.get_running_loop().create_future()
        back = Client("back0", clean=False)
        back.is_silent = True
        back.on_message = lambda _payload, first=first: None if first.done() else first.set_result(None)
        where = given["ports"][turn % len(given["ports"])]
        await asyncio.get_running_loop().create_connection(lambda back=back: back, "127.0.0.1", where)
        started = time.monotonic()
        opening = asyncio.ensure_future(back.ask(back.first_packet))
        await asyncio.wait_for(first, 30)
        times.append(time.monotonic() - started)
        await opening
        back.close()
    return {"resumed": spread(times), "longest": max(times) * 1000}


async def slow(port: int, given: dict[str, Any]) -> dict[str, Any]:
    """Many clients publish for some seconds to one subscriber, which acknowledges 1 000 a second."""
    (reader,) = await opened(port, "slow", 1, clean=False, topic="slow")
    writers = await opened(port, "sw", given["clients"], clean=True)
    ready()
    flow = Flow([each.to("slow") for each in writers], 10**9, 0)
    got, last = set[bytes](), time.monotonic()

    def received(payload: bytes) -> None:
        nonlocal last
        got.add(payload[:20])
        last = time.monotonic()

    reader.on_message, reader.delay = received, 0.001
    await flow.run(given["seconds"])
    flow.left = 0  # nothing new from now on
    reader.delay = 0.0
    last = time.monotonic()
    while time.monotonic() - last < 5:
        await asyncio.sleep(0.05)
    return {"acked": flow.acked, "delivered": len(got), "puback": spread(flow.ack_times)}


WORKS: Final = {each.__name__: each for each in (ingest, pairs, single, fan, connects, absent, resume, slow)}


async def main() -> None:
    """Do one work."""
    work, port, given = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    print(json.dumps(await WORKS[work](port, given)), flush=True)


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
