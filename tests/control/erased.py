"""A handler whose messages end in every way, and where the server holds what they were."""

from __future__ import annotations

import asyncio
from typing import Any

from tenacity import wait_fixed

from rsmq import Broker, Message, Reject, Retry, RetryPolicy
from tests.contract.witness import ask


def sender(broker: Broker) -> None:
    """The handler of `push`: by its text a message waits for its retry, is rejected, or takes a while."""

    @broker.handler("push", group="sender", retry=RetryPolicy(max_attempts=3, wait=wait_fixed(3600)))
    async def send(text: str, message: Message) -> None:
        if "parked" in text:
            raise Retry(text)
        if "dead" in text:
            raise Reject(text)
        if "slow" in text:
            await asyncio.sleep(0.02)


async def holds(broker: Broker, text: str) -> list[str]:
    """The keys of this deployment whose value has a text, or whose name has it."""
    found, needle = [], text.encode()
    for name in await ask(broker, "KEYS", f"{broker.keys.prefix}:*"):
        kind = await ask(broker, "TYPE", name)
        reads: dict[bytes, tuple[Any, ...]] = {
            b"stream": ("XRANGE", name, "-", "+"), b"hash": ("HGETALL", name), b"zset": ("ZRANGE", name, 0, -1),
            b"string": ("GET", name),
        }  # fmt: skip
        value = repr(await ask(broker, *reads[kind])) if kind in reads else ""
        if needle in value.encode() or needle in name:
            found.append(name.decode())
    return found
