"""The identity of a deployment: a random id under its prefix, made once in its server."""

from __future__ import annotations

import secrets

from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client


async def deployment_id(client: Client, keys: Keys, known: str = "") -> str:
    """The id under this prefix. If there is none it becomes `known`, as after FLUSHALL, or a new one.

    Replicas have it, and so does the server that replaces a master. A server that is restored from a dump of another
    one has that one's.
    """
    made = known or secrets.token_hex(16)
    found: bytes | None = await client.execute_command("SET", keys.deployment, made, "NX", "GET")
    return made if found is None else found.decode(errors="replace")
