"""Channels: announcements, and who listens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client


async def announce(client: Client, keys: Keys, topic: str, group: str, what: str = "") -> int:
    """Tell all members of a group of a change, of which each reads the state itself, or `what`: news (`news_of`) for
    which they need not read it, or a question. Returns how many heard it: on a cluster those at one of the nodes."""
    return int(await client.execute_command("PUBLISH", keys.changes(topic, group), what))


async def listeners(client: Client, channels: Sequence[str]) -> list[int]:
    """The number of subscribers of each channel."""
    if not channels:
        return []
    if not client.is_cluster:
        return list((await client.execute_command("PUBSUB", "NUMSUB", *channels))[1::2])
    replies = await _replies(client, [("PUBSUB", "SHARDNUMSUB", channel) for channel in channels])
    counts = [reply[1] for reply in replies]
    # a node that has lost the slot answers 0 instead of an error: each 0 is confirmed by a probe, under
    # the newest slot map, because a replica counts only its own subscribers
    silent = [channel for channel, count in zip(channels, counts, strict=True) if not count]
    if silent:
        client.mark_stale()
    probed = dict(zip(silent, await _replies(client, [probe(channel) for channel in silent]), strict=True))
    return [count or probed[channel] for channel, count in zip(channels, counts, strict=True)]


async def _replies(client: Client, commands: Sequence[tuple[str, ...]]) -> list[Any]:
    replies = await client.pipelined(commands)
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def probe(channel: str) -> tuple[str, str, str]:
    """A command that sends an empty message to a sharded channel.

    Its reply is the number of receivers, or a redirection to the node that serves the slot now.
    """
    return ("SPUBLISH", channel, "")
