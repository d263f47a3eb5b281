"""Keys of rsmq that hold a value of another type: another program has written them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from rsmq.errors import ConfigError
from rsmq.model.keys import Keys
from rsmq.model.layout import read_layout
from rsmq.model.record import exact_text, text
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import ask_all, groups_of


async def foreign_keys(client: Client, keys: Keys) -> list[str]:
    """`KEY is a string, not a hash` for each of them. For a server that has answered WRONGTYPE: it looks at all keys
    of all topics and groups."""
    found = await wrong_types(client, {keys.topics: "set", keys.outboxes: "hash", keys.gateways: "zset"})
    if keys.topics in found:
        return list(found.values())
    topics = list(filter(None, map(exact_text, await client.execute_command("SMEMBERS", keys.topics))))
    found |= await wrong_types(client, {keys.topic(topic): "hash" for topic in topics})
    topics = [topic for topic in topics if keys.topic(topic) not in found]
    sizes = await ask_all(client, [("HMGET", keys.topic(topic), "partitions", "layout") for topic in topics])
    for topic, (size, layout) in zip(topics, sizes, strict=True):
        try:
            partitions = read_layout(topic, size, layout).numbers if size else ()
        except ConfigError:  # another client has written it: the doctor says so
            continue
        found |= await wrong_types(client, of_partitions(keys, topic, partitions))
        streams = [stream for number in partitions if (stream := keys.stream(topic, number)) not in found]
        groups = sorted({text(row["name"]) for stream in streams for row in await groups_of(client, stream)})
        found |= await wrong_types(client, of_groups(keys, topic, partitions, groups))
    return list(found.values())


def of_partitions(keys: Keys, topic: str, partitions: Sequence[int]) -> dict[str, str]:
    """The keys of these partitions, and their types."""
    kinds = {
        keys.stream: "stream", keys.delayed: "zset", keys.unique: "hash", keys.marks: "zset", keys.removed: "hash",
        keys.archived: "hash", keys.jobs: "hash", keys.every: "hash", keys.relayed: "hash",
    }  # fmt: skip
    return {key(topic, number): kind for number, (key, kind) in product(partitions, kinds.items())}


def of_groups(keys: Keys, topic: str, partitions: Sequence[int], groups: list[str]) -> dict[str, str]:
    """The keys of these groups, and their types."""
    kinds = {
        keys.lease: "hash", keys.retry: "zset", keys.out: "stream", keys.errors: "hash", keys.cancels: "hash",
        keys.cancelled: "zset", keys.dlq: "stream", keys.handed_on: "stream", keys.steps: "hash",
        keys.progress: "hash",
    }  # fmt: skip
    found = {
        key(topic, number, group): kind for number, group, (key, kind) in product(partitions, groups, kinds.items())
    }
    for group in groups:
        found |= {keys.group(topic, group): "hash", keys.members(topic, group): "set"}
    return found


async def wrong_types(client: Client, kinds: Mapping[str, str]) -> dict[str, str]:
    """Those of these keys that exist and have another type, with a text about each."""
    replies = await ask_all(client, [("TYPE", key) for key in kinds])
    types = [reply.decode() for reply in replies]
    return {
        key: f"{key} is a {type_}, not a {kind}"
        for (key, kind), type_ in zip(kinds.items(), types, strict=True)
        if type_ not in ("none", kind)
    }
