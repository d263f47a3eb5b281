"""Removing what a test has left in the server."""

from __future__ import annotations

from anyio.from_thread import start_blocking_portal

from rsmq.connect import Client, Connector
from rsmq.settings import Settings


def remove_keys(url: str, prefix: str) -> int:
    """Delete every key under a prefix, whoever made it, and return how many. For code without an event loop."""
    with start_blocking_portal() as portal:
        return portal.call(_remove, Connector(url, Settings(url=url, prefix=prefix)), prefix)


async def _remove(connector: Connector, prefix: str) -> int:
    async with connector.connected() as client:
        await client.refresh()
        return sum([await _remove_at(node, client, prefix) for node in client.nodes])


async def _remove_at(node: Client, client: Client, prefix: str) -> int:
    """What one node holds; on a cluster keys of one call would have to share a slot."""
    cursor, removed = b"", 0
    while cursor != b"0":
        cursor, keys = await node.execute_command("SCAN", cursor or 0, "MATCH", f"{prefix}:*", "COUNT", 1000)
        removed += sum(await client.pipelined([("UNLINK", key) for key in keys])) if keys else 0
    return removed
