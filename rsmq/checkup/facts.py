"""What the checkup looks at: two snapshots, the topics' limits, every consumer, and a few settings of the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import anyio

from rsmq.connect import Client
from rsmq.errors import BrokerError
from rsmq.keys import Keys
from rsmq.observer import Observer
from rsmq.settings import Settings
from rsmq.stream import as_dict, is_missing
from rsmq.topic import Topic, Topics
from rsmq.trend import Board, compare

SAMPLE: Final = 50
"""Newest messages of a partition in which a hot key is looked for."""

Place = tuple[str, str, int]
"""Topic, group, partition."""


@dataclass(frozen=True, slots=True)
class Hand:
    """One consumer of a partition, as the server knows it."""

    place: Place
    name: str
    pending: int
    idle: timedelta


@dataclass(frozen=True, slots=True)
class Oldest:
    """The oldest pending entry of a share. `is_gone`: the stream does not have it any more."""

    place: Place
    id: str
    consumer: str
    idle: timedelta
    is_gone: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the rules need; `config` is what the server lets us read, of all its nodes together."""

    settings: Settings
    board: Board
    topics: Mapping[str, Topic]
    hands: Sequence[Hand]
    oldest: Sequence[Oldest]
    config: Mapping[str, str]
    common_keys: Mapping[tuple[str, int], tuple[str, float]]
    """Topic and partition -> the most frequent key among its newest messages, and its part of them."""


async def gather(client: Client, keys: Keys, settings: Settings, over: timedelta) -> Facts:
    """Look twice, `over` apart, and at what two looks do not show. Changes nothing."""
    observer = Observer(client, keys, settings)
    before = await observer.look()
    await anyio.sleep(over.total_seconds())
    board = compare(before, await observer.look())
    names = [topic.name for topic in board.topics]
    found = [await Topics(client, keys, settings).find(name) for name in names]
    places = [(group.topic, group.name, share.partition) for group in board.groups for share in group.shares]
    return Facts(
        settings=settings,
        board=board,
        topics={topic.name: topic for topic in found if topic is not None},
        hands=await consumers(client, keys, places),
        oldest=await oldest_pending(client, keys, places),
        config=await config_of(client),
        common_keys=await most_common(client, keys, crowded(board)),
    )


async def consumers(client: Client, keys: Keys, places: Sequence[Place]) -> list[Hand]:
    """All consumers of all shares."""
    questions = [("XINFO", "CONSUMERS", keys.stream(topic, number), group) for topic, group, number in places]
    return [
        Hand(place, row["name"].decode(errors="replace"), row["pending"], timedelta(milliseconds=row["idle"]))
        for place, rows in zip(places, await asked(client, questions), strict=True)
        for row in map(as_dict, rows or ())
    ]


async def oldest_pending(client: Client, keys: Keys, places: Sequence[Place]) -> list[Oldest]:
    """Of each share that has something pending the oldest, and whether the stream still has it."""
    streams = [keys.stream(topic, number) for topic, _, number in places]
    questions = [
        ("XPENDING", stream, group, "-", "+", 1) for stream, (_, group, _) in zip(streams, places, strict=True)
    ]
    rows = [
        (place, stream, reply[0])
        for place, stream, reply in zip(places, streams, await asked(client, questions), strict=True)
        if reply
    ]
    there = await asked(client, [("XRANGE", stream, row[0], row[0]) for _, stream, row in rows])
    return [
        Oldest(place, row[0].decode(), row[1].decode(errors="replace"), timedelta(milliseconds=row[2]), not found)
        for (place, _, row), found in zip(rows, there, strict=True)
    ]


def crowded(board: Board) -> list[tuple[str, int]]:
    """Partitions in which a group waits for more than in all the others on average, by far."""
    found = set()
    for group in board.groups:
        lags = [share.lag or 0 for share in group.shares]
        mean = sum(lags) / max(1, len(lags))
        found |= {(group.topic, s.partition) for s in group.shares if (s.lag or 0) > max(1000, 3 * mean)}
    return sorted(found)


async def most_common(
    client: Client, keys: Keys, partitions: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], tuple[str, float]]:
    """The most frequent key of each of these partitions, among its newest messages."""
    found = {}
    for place in partitions:
        (entries,) = await asked(client, [("XREVRANGE", keys.stream(*place), "+", "-", "COUNT", SAMPLE)])
        named = Counter(dict(zip(fields[::2], fields[1::2], strict=False)).get(b"key") for _, fields in entries or ())
        named.pop(None, None)
        for key, count in named.most_common(1):
            found[place] = ((key or b"").decode(errors="backslashreplace"), count / len(entries))
    return found


async def config_of(client: Client) -> dict[str, str]:
    """The first node's; empty where it may not be read."""
    config: dict[str, str] = {}
    for name in ("timeout", "tcp-keepalive"):
        try:
            flat = await client.nodes[0].execute_command("CONFIG", "GET", name)
        except BrokerError:
            continue
        config |= {key: value.decode() for key, value in as_dict(flat).items()}
    return config


async def asked(client: Client, questions: Sequence[Sequence[Any]]) -> list[Any]:
    """The replies, None for what does not exist any more. Raises any other error."""
    replies = await client.pipelined(questions)
    for reply in replies:
        if isinstance(reply, Exception) and not is_missing(reply):
            raise reply
    return [None if isinstance(reply, Exception) else reply for reply in replies]
