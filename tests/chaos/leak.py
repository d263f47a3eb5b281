"""What is left in the server when everybody has stopped: members, leases, connections, keys without an end."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from rsmq import Broker

ENDLESS = re.compile(r":topics$|:topic:\{|\}$|\}:(marks|removed|delayed|archived|jobs)$|\}:crew(:(lease|retry|dlq))?$")
"""Keys that stay: topics, partitions, groups, leases (they hold the epoch) and dead letters."""


async def leaks(broker: Broker, topic: str, group: str) -> list[str]:
    """Everything of a group that should be gone when its last member has left in order."""
    ask: Callable[..., Awaitable[Any]] = broker.client.execute_command
    found = [f"member {member.decode()}" for member in await ask("SMEMBERS", broker.keys.members(topic, group))]
    for node in broker.client.nodes:
        cursor = 0
        while True:
            cursor, page = await node.execute_command("SCAN", cursor, "MATCH", f"{broker.keys.prefix}:*", "COUNT", 1000)
            endless = [key for key in page if not ENDLESS.search(key.decode(errors="replace"))]
            found += [f"key {key!r} has no TTL" for key in endless if await ask("TTL", key) == -1]
            if not int(cursor):
                break
    return found
