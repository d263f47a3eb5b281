"""A place of one's own on somebody's server: a random prefix, and nothing of it left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from secrets import token_hex

import anyio

from rsmq.connect import Client

PATIENCE = 30.0
"""Seconds that cleaning up may take."""


@asynccontextmanager
async def scratch(client: Client) -> AsyncIterator[str]:
    """A prefix for the length of the block. Afterwards, also after Ctrl-C, no key has it."""
    prefix = f"bench-{token_hex(4)}"
    try:
        yield prefix
    finally:
        with anyio.move_on_after(PATIENCE, shield=True):
            await remove(client, prefix)


async def remove(client: Client, prefix: str) -> None:
    """Delete every key below a prefix."""
    cursor: bytes | int = 0
    while True:
        cursor, names = await client.execute_command("SCAN", cursor, "MATCH", f"{prefix}:*", "COUNT", 1000)
        if names:
            await client.execute_command("UNLINK", *names)
        if int(cursor) == 0:
            return
