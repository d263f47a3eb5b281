"""The facts of the doctor: two snapshots, the topics' limits, every consumer, and a few settings of the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import anyio

from rsmq.errors import BrokerError, ConfigError
from rsmq.inspector.doctor.mqtt import MqttFacts, mqtt_facts
from rsmq.inspector.observer import Observer
from rsmq.inspector.schedules import ScheduleState
from rsmq.inspector.state import Snapshot, TopicState
from rsmq.inspector.trend import Board, compare
from rsmq.model.batch_member import HOME, SHARDS
from rsmq.model.keys import Keys
from rsmq.model.packing import by_name
from rsmq.model.record import text
from rsmq.model.settings import Settings
from rsmq.model.stream_id import parse_stream_id
from rsmq.redis.client.connector import Client
from rsmq.redis.pubsub import listeners
from rsmq.redis.streams import as_dict, ask_all, server_now_ms
from rsmq.redis.topics import Topic

SAMPLE: Final = 50
"""Newest messages of a partition that are searched for a hot key."""
MOST_BATCHES: Final = 1000
NEWEST: Final = 3
"""Newest messages of a topic that are searched for an id."""


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """One consumer of a group in a partition, as the server knows it."""

    topic: str
    group: str
    partition: int
    name: str
    pending: int
    idle: timedelta


@dataclass(frozen=True, slots=True)
class OldestPending:
    """The oldest pending entry of a group in a partition. `is_gone`: the stream does not have it any more.

    `may_run`: it may have started; what was put aside, and waits for its key, a rate or its tenant's turn, has not.
    """

    topic: str
    group: str
    partition: int
    id: str
    consumer: str
    idle: timedelta
    is_gone: bool
    may_run: bool = True


@dataclass(frozen=True, slots=True)
class WaitingOutputs:
    """Outputs of settled messages that wait in an out-stream (on a cluster), and since when the oldest does."""

    topic: str
    group: str
    partition: int
    count: int
    age: timedelta


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """Everything that the rules need. `config` has what this user may read of the first node's settings."""

    settings: Settings
    board: Board
    topics: Mapping[str, Topic]
    consumers: Sequence[ConsumerState]
    oldest: Sequence[OldestPending]
    config: Mapping[str, str]
    common_keys: Mapping[tuple[str, int], tuple[str, float]]
    """Topic and partition -> the most frequent key among its newest messages, and its part of them."""
    outputs: Sequence[WaitingOutputs] = ()
    without_ids: Sequence[str] = ()
    """Topics whose newest messages have no id of a publisher."""
    mqtt: MqttFacts | None = None
    unreadable: Sequence[str] = ()
    """What is wrong with records of topics that cannot be read."""
    schedules: Sequence[ScheduleState] = ()
    callbacks: Sequence[OpenCallback] = ()
    gone: frozenset[str] = frozenset()
    """The members of topics that are being resized whose processes are gone, though their heartbeats have not
    expired."""


@dataclass(frozen=True, slots=True)
class OpenCallback:
    """Where a batch that has not called yet will call."""

    batch: str
    topic: str


async def gather(client: Client, keys: Keys, settings: Settings, over: timedelta) -> QueueFacts:
    """Take two snapshots, `over` apart, and ask what they do not show. Changes nothing."""
    observer = Observer(client, keys, settings)
    before = await observer.snapshot()
    await anyio.sleep(over.total_seconds())
    after = await observer.snapshot()
    board = compare(before, after)
    partitions = [(group.topic, group.name, share.partition) for group in board.groups for share in group.shares]
    return QueueFacts(
        settings=settings,
        board=board,
        topics={state.topic.name: state.topic for state in after.topics},
        consumers=await consumers(client, keys, partitions),
        oldest=await oldest_pending(client, keys, partitions),
        config=await config_of(client),
        common_keys=await most_common(client, keys, crowded(board)),
        outputs=await waiting_outputs(client, keys, partitions) if client.is_cluster else (),
        without_ids=await topics_without_ids(client, keys, after.topics),
        mqtt=await mqtt_facts(client, keys),
        unreadable=observer.unreadable,
        schedules=await observer.schedules(after),
        callbacks=await open_callbacks(client, keys),
        gone=await gone_members(client, keys, after),
    )


async def gone_members(client: Client, keys: Keys, state: Snapshot) -> frozenset[str]:
    """The members that a resize does not wait for: they know layouts, and have no presence connection."""
    growing = {each.topic.name for each in state.topics if each.topic.layout.following is not None}
    names = [each.id for each in state.members if each.topic in growing and each.layout is not None]
    try:
        counts = await listeners(client, [keys.presence(name) for name in names])
    except ConfigError:  # this user may not ask: then they are named as members that live
        return frozenset()
    return frozenset(name for name, number in zip(names, counts, strict=True) if not number)


async def open_callbacks(client: Client, keys: Keys) -> list[OpenCallback]:
    """The callbacks of batches that have not called yet, of the first thousand."""
    names = await ask_all(client, [("HGETALL", keys.batch_names(shard)) for shard in range(SHARDS)])
    homes = [home for flat in names for home in as_dict(flat or ()).values() if HOME.fullmatch(text(home))]
    states = await ask_all(client, [("HGETALL", keys.batch_state(text(home))) for home in homes[:MOST_BATCHES]])
    found = list[OpenCallback]()
    for state in map(as_dict, (each for each in states if each)):
        for which, called in (("on_complete", "ended_ms"), ("on_success", "succeeded_ms")):
            topic = text(state.get(which, b"")).rpartition(":{")[2].rpartition(".")[0]
            if topic and called not in state:
                found.append(OpenCallback(text(state.get("name", b"")), topic))
    return found


async def consumers(client: Client, keys: Keys, partitions: Sequence[tuple[str, str, int]]) -> list[ConsumerState]:
    """The consumers of all groups in all partitions."""
    questions = [("XINFO", "CONSUMERS", keys.stream(topic, number), group) for topic, group, number in partitions]
    return [
        ConsumerState(
            *each, row["name"].decode(errors="replace"), row["pending"], timedelta(milliseconds=row["idle"])
        )
        for each, rows in zip(partitions, await ask_all(client, questions), strict=True)
        for row in map(as_dict, rows or ())
    ]  # fmt: skip


async def oldest_pending(client: Client, keys: Keys, partitions: Sequence[tuple[str, str, int]]) -> list[OldestPending]:
    """The oldest pending entry of each group in each partition, and whether the stream still has it."""
    replies = await ask_all(
        client, [("XPENDING", keys.stream(topic, number), group, "-", "+", 1) for topic, group, number in partitions]
    )
    found = [(each, reply[0]) for each, reply in zip(partitions, replies, strict=True) if reply]
    entries = await ask_all(
        client, [("XRANGE", keys.stream(topic, number), row[0], row[0]) for (topic, _, number), row in found]
    )
    return [
        OldestPending(
            *each, row[0].decode(), row[1].decode(errors="replace"), timedelta(milliseconds=row[2]), not entry,
            may_run=row[3] > 0,
        )
        for (each, row), entry in zip(found, entries, strict=True)
    ]  # fmt: skip


async def waiting_outputs(
    client: Client, keys: Keys, partitions: Sequence[tuple[str, str, int]]
) -> list[WaitingOutputs]:
    """The out-streams that are not empty."""
    outs = [keys.out(topic, number, group) for topic, group, number in partitions]
    lengths = await ask_all(client, [("XLEN", out) for out in outs])
    oldest = await ask_all(client, [("XRANGE", out, "-", "+", "COUNT", 1) for out in outs])
    now_ms = await server_now_ms(client.nodes[0])
    return [
        WaitingOutputs(*each, length, timedelta(milliseconds=now_ms - parse_stream_id(entries[0][0])[0]))
        for each, length, entries in zip(partitions, lengths, oldest, strict=True)
        if length and entries
    ]


async def topics_without_ids(client: Client, keys: Keys, topics: Sequence[TopicState]) -> list[str]:
    """Topics in which none of the newest messages of a partition has an id, found by one read for each topic."""
    named = {topic.topic.name: next((each for each in topic.partitions if each.length), None) for topic in topics}
    asked = [(name, partition.partition) for name, partition in named.items() if partition is not None]
    replies = await ask_all(client, [("XREVRANGE", keys.stream(*each), "+", "-", "COUNT", NEWEST) for each in asked])
    return [
        name
        for (name, _), entries in zip(asked, replies, strict=True)
        if entries and not any(b"id" in fields[::2] for _, fields in entries if fields)
    ]


def crowded(board: Board) -> list[tuple[str, int]]:
    """Partitions in which far more is unread than in the average one of the group."""
    found = set()
    for group in board.groups:
        lags = {share.partition: share.unread if share.is_unread_exact else 0 for share in group.shares}
        mean = sum(lags.values()) / max(1, len(lags))
        found |= {(group.topic, number) for number, unread in lags.items() if unread > max(1000, 3 * mean)}
    return sorted(found)


async def most_common(
    client: Client, keys: Keys, partitions: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], tuple[str, float]]:
    """The most frequent key of each of these partitions, among its newest messages."""
    found = {}
    for each in partitions:
        (entries,) = await ask_all(client, [("XREVRANGE", keys.stream(*each), "+", "-", "COUNT", SAMPLE)])
        named = Counter(by_name(fields).get(b"key") for _, fields in entries or ())
        named.pop(None, None)
        for key, count in named.most_common(1):
            found[each] = ((key or b"").decode(errors="backslashreplace"), count / len(entries))
    return found


async def config_of(client: Client) -> dict[str, str]:
    """The first node's; empty where this user may not read it."""
    config: dict[str, str] = {}
    for name in ("timeout", "tcp-keepalive"):
        try:
            flat = await client.nodes[0].execute_command("CONFIG", "GET", name)
        except (BrokerError, ConfigError):
            continue
        config |= {key: value.decode() for key, value in as_dict(flat).items()}
    return config
