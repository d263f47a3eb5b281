"""Mutated packets against the codec and against a running gateway: `python -m tests.gateway.fuzz --minutes 10`.

The machine must return packets or set its error, and raise nothing. The gateway must go on: one connection is watched
all the time, and its log may have no traceback. What fails is printed with its seed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from contextlib import suppress

from rsmq.gateway.protocol.machine import ClientLimits, Machine
from tests.gateway import packets as p
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.servers import Server

LIMITS = ClientLimits(packet_size=1 << 16, receive_maximum=20, topic_aliases=8)
VALID = [
    p.publish("a/b", b"payload", 1, 5, 5, raw_props=b"\x01\1\x03\0\1x\x26\0\1a\0\1b\x08\0\1r\x09\0\1z"),
    p.subscribe([("a/+", 1), ("$share/g/b/#", 2)], 3, 5, b"\x0b\x85\1"), p.unsubscribe(["a/+"], 4, 5),
    p.ack(4, 5, 0), p.ack(5, 6, 0x10), p.ack(6, 7), p.ack(7, 8, 0x92), p.PING, p.packet(0xE0, b"\4\0"),
    p.publish("q", b"", 2, 9, 5, retain=True),
]  # fmt: skip
MORE = [
    p.publish("", b"alias", 1, 6, 5, raw_props=b"\x23\0\1"), p.publish("a/b", b"", 0, 0, 5, raw_props=b"\x23\0\1"),
    p.publish("a/x", b"v", 1, 7, 5, raw_props=b"\2\0\0\0\1", retain=True), p.subscribe([("#", 0x2D)], 8, 5),
    p.publish("a/b", b"3", 1, 5, 4), p.subscribe([("a/b", 2)], 9, 4), p.unsubscribe(["#"], 11, 4), p.DISCONNECT,
    p.packet(0xE0, b"\0\5\x11\0\0\0\7"), p.packet(0xF0, b"\x18\4\x15\0\1x"),
]  # fmt: skip
CONNECTS = [
    p.connect("c", 5, raw_props=b"\x11\0\0\0\x0a\x21\0\5", username="u", password=b"p", will=("w", b"x", 1, True),
              will_props=b"\x18\0\0\0\5"), p.connect("c", 4, username="u"), p.connect("c", 3),
]  # fmt: skip


def mutated(rng: random.Random, packet: bytes, most: int = 4) -> bytes:
    """A packet with up to `most` of its bytes changed, removed or added."""
    data = bytearray(packet)
    for _ in range(rng.randint(1, most)):
        at = rng.randrange(len(data))
        action = rng.random()
        if action < 0.5:
            data[at] = rng.randrange(256)
        elif action < 0.75 and len(data) > 1:
            del data[at]
        else:
            data.insert(at, rng.randrange(256))
    return bytes(data)


def fuzz_machine(rng: random.Random, packets: list[bytes]) -> bool:
    """Feed one mutated packet to a new connection. Returns whether it was refused."""
    is_first = rng.random() < 0.3
    data = mutated(rng, rng.choice(CONNECTS if is_first else packets))
    one = Machine(LIMITS)
    if not is_first:
        one.feed(p.connect(level=rng.choice((3, 4, 5))))
        one.accept(session_present=False)
    one.feed(data)
    assert one.held <= len(data)
    return one.error is not None


async def fuzz_connection(rng: random.Random, port: int) -> None:
    """One connection that sends valid and mutated packets in pieces, and is cut off or left at any point."""
    one = await RawClient(port, 5).open()
    first = p.connect(f"f{rng.randrange(6)}", rng.choice((3, 4, 5)), clean=rng.random() < 0.5)
    sent = mutated(rng, first, 2) if rng.random() < 0.1 else first
    for _ in range(rng.randint(0, 12)):
        packet = rng.choice(VALID + MORE)
        sent += mutated(rng, packet, 2) if rng.random() < 0.15 else packet
    while sent:
        size = rng.choice((1, 7, 100, 5_000))
        one.send(sent[:size])
        sent = sent[size:]
        if rng.random() < 0.3:
            with suppress(ConnectionError):
                await one._writer.drain()
    if rng.random() < 0.5:
        one.send(p.DISCONNECT)
        one.close()
    else:
        with suppress(TimeoutError, ConnectionError, UnicodeDecodeError, IndexError):
            async with asyncio.timeout(rng.random() / 5):
                await one._reader.read()
        one.abort()


async def fuzz_gateway(seed: int, until: float) -> int:
    """Returns the number of connections."""
    rng, number = random.Random(seed), 0
    with Server() as server, GatewayProcess(server.url, "fuzz", connect_timeout=2, most_subscriptions=50) as gateway:
        watching = await RawClient(gateway.port, 5).connect("watching", keep_alive=0)
        while time.monotonic() < until:
            await asyncio.gather(*(fuzz_connection(random.Random(rng.random()), gateway.port) for _ in range(20)))
            number += 20
            assert await watching.is_silent()
            assert "Traceback" not in gateway.log(), gateway.log()
        watching.abort()
    return number


def main() -> int:
    """Half of the time for the codec, half for a gateway."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    print("seed", options.seed, flush=True)
    rng, number, refused = random.Random(options.seed), 0, 0
    half = options.minutes * 30
    end = time.monotonic() + half
    while time.monotonic() < end:
        state = rng.getstate()
        number += 1
        try:
            refused += fuzz_machine(rng, VALID + MORE)
        except Exception:
            rng.setstate(state)
            is_first = rng.random() < 0.3
            print("FAILED", is_first, mutated(rng, rng.choice(CONNECTS if is_first else VALID + MORE)).hex())
            raise
    print(f"codec: {number} packets, {refused} refused", flush=True)
    print(f"gateway: {asyncio.run(fuzz_gateway(options.seed, time.monotonic() + half))} connections", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
