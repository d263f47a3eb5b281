"""Removing what a test has left in the server."""

from __future__ import annotations

from rsmq.connect import Connector
from rsmq.settings import Settings


def remove_keys(url: str, prefix: str) -> int:
    """Delete every key under a prefix, whoever made it, and return how many. A prefix of rsmq's alphabet only."""
    client = Connector(url, Settings(url=url, prefix=prefix)).blocking_client()
    try:
        keys: list[bytes] = []
        cursor = b""
        while cursor != b"0":
            cursor, page = client.execute_command("SCAN", cursor or 0, "MATCH", f"{prefix}:*", "COUNT", 1000)
            keys += page
        for key in keys:
            client.execute_command("UNLINK", key)
        return len(keys)
    finally:
        client.close()
