"""What tests of sessions share: the next letters of a device, and whether it waits to be woken."""

from __future__ import annotations

from typing import Final

import anyio

from rsmq import Broker, Letter, Session

SOON: Final = 20.0
"""Far below the poll of their brokers, unless a test says otherwise: what comes in time was rung for."""


async def take(session: Session, count: int) -> list[Letter]:
    """The next letters."""
    with anyio.fail_after(SOON):
        return [await anext(session) for _ in range(count)]


async def waits(broker: Broker, device: str = "phone") -> None:
    """Wait until the session has found its inbox empty and waits to be woken."""
    with anyio.fail_after(SOON):
        while await broker.client.execute_command("HGET", broker.keys.session(device), "idle") != b"1":
            await anyio.sleep(0.001)
