"""What the workers of a group leave in the server when all of them have stopped: members and keys without a TTL."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from rsmq import Broker

PERMANENT = re.compile(
    r":topics$|:topic:\{|\}$|\}:(marks|removed|delayed|archived|jobs|relayed)$"
    r"|\}:workers(:(lease|retry|dlq|errors|cancels|cancelled))?$"
)
"""Keys that have no TTL: topics, partitions, groups, leases (they hold the epoch), dead letters, what is known of
single messages until retention removes them, and what an outbox has relayed."""


async def leaks(broker: Broker, topic: str, group: str) -> list[str]:
    """Members and keys that should be gone after the last member of a group has stopped in order."""
    ask: Callable[..., Awaitable[Any]] = broker.client.execute_command
    found = [f"member {member.decode()}" for member in await ask("SMEMBERS", broker.keys.members(topic, group))]
    for node in broker.client.nodes:
        cursor = 0
        while True:
            cursor, page = await node.execute_command("SCAN", cursor, "MATCH", f"{broker.keys.prefix}:*", "COUNT", 1000)
            without_ttl = [key for key in page if not PERMANENT.search(key.decode(errors="replace"))]
            found += [f"key {key!r} has no TTL" for key in without_ttl if await ask("TTL", key) == -1]
            if not int(cursor):
                break
    return found
