"""Commands on the streams and groups of a topic, and the parsing of their replies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, Protocol

from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError
from rsmq.model.clock import epoch_ms, now_ms, server_ms
from rsmq.model.encoding import ENC, key_of
from rsmq.model.keys import Keys, check_name
from rsmq.model.layout import WITH_BANDS, Layout, plain_distribution, read_layout, stored_distribution
from rsmq.model.packing import by_name
from rsmq.model.record import text
from rsmq.model.stream_id import LARGEST_PART, is_position, parse_stream_id
from rsmq.model.words import suggestion
from rsmq.redis.client.connector import Client
from rsmq.redis.pubsub import announce
from rsmq.redis.scripts import OK, RESET_GROUP, TRIM_PARTITION, Commander

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
NOTHING: Final = b"0-0"
"""Lower than the id of any entry."""

Id = str | bytes
"""A stream id, or a bound of a range: `(id`, `-`, `+`."""
TRIM_ATTEMPTS: Final = 5
MISSING: Final = ("no such key", "nogroup", "requires the key to exist")


class Partitioned(Protocol):
    """A topic, as far as this module needs it."""

    @property
    def name(self) -> str: ...
    @property
    def numbers(self) -> Sequence[int]: ...


FULL_TRIM: Final = 1000
"""One call trims at most 100 nodes of a stream, 10 000 entries by default; after this many, more may be left."""


class Trimmed(NamedTuple):
    """The result of a trim: `word` is `OK`, `NO_GROUPS`, `TOO_MANY_PARKED`, `NO_POSITION` or `GROUPS_CHANGED`.

    `group` is the one that has too many parked messages (it is not known how often they were tried, or very often), or
    the archive whose position cannot be read. `is_more`: another call may remove more.
    """

    word: bytes
    removed: int = 0
    group: str = ""
    is_more: bool = False


SEALED: Final = b"%d-%d" % (LARGEST_PART, LARGEST_PART)
"""The last generated id of a stream that takes no entries any more."""


def newest_id(info: Mapping[str, Any]) -> bytes:
    """Of XINFO STREAM: the id of the newest entry that was ever added, or, of a sealed stream, that is there."""
    last: bytes = info["last-generated-id"]
    if last != SEALED:
        return last
    return bytes(info["last-entry"][0]) if info["last-entry"] else NOTHING


def as_dict(flat: Sequence[Any]) -> dict[str, Any]:
    """A flat reply (name, value, name, value, ...) as a dict with text names. Raises BrokerError for half a pair."""
    if len(flat) % 2:
        raise BrokerError(f"a reply of names and values has {len(flat)} parts")
    pairs = iter(flat)
    return {name.decode(errors="replace"): value for name, value in zip(pairs, pairs, strict=True)}


async def read_entries(client: Client, command: str, stream: str, start: Id, end: Id, count: int) -> list[Any]:
    """The first `count` entries of an XRANGE or XREVRANGE from `start` to `end`.

    Several reads, where a server or proxy closes connections with large answers.
    """
    entries = list[Any]()
    while len(entries) < count:
        most = min(client.page_limit.of(count), count - len(entries))
        try:
            with client.page_limit.asking():
                page = await client.execute_command(command, stream, start, end, "COUNT", most)
        except BrokerUnavailable as error:
            if error.is_broken and most > 1:
                continue
            raise
        entries += page
        if len(page) < most:
            break
        start = b"(" + page[-1][0]
    return entries


def start_id(start: str | datetime) -> str:
    """Where a new or reset group begins, as XGROUP wants it: the last id that counts as delivered.

    A stream id is exclusive: entries after it are delivered. For a datetime, entries at or after it are delivered.
    """
    if isinstance(start, datetime):
        ms = epoch_ms(start)
        return f"{ms - 1}-{LARGEST_PART}" if ms > 0 else "0"
    if start == EARLIEST:
        return "0"
    if start == LATEST:
        return "$"
    if isinstance(start, str) and (start == "$" or is_position(start)):
        return start
    raise ConfigError(
        f"start {start!r} is not understood: use earliest, latest, a stream id such as 1718000000000-0, or a time"
    )


async def server_now_ms(client: Commander) -> int:
    """The time of the server, in milliseconds since 1970."""
    return server_ms(await client.execute_command("TIME"))


async def ask_all(client: Client, questions: Sequence[Sequence[Any]]) -> list[Any]:
    """Their replies, asked together; None for a stream or group that does not exist. Raises any other error."""
    replies = await client.pipelined(questions)
    for reply in replies:
        if isinstance(reply, Exception) and not is_missing(reply):
            raise reply
    return [None if isinstance(reply, Exception) else reply for reply in replies]


async def ensure_groups(client: Client, keys: Keys, topic: Joined, group: str, start: str = "0") -> None:
    """Create the group in every partition without it; an existing group keeps its position.

    Partitions that follow others come first: a group that starts at the end would else miss messages that come after
    others which it gets.
    """
    numbers = topic.numbers[::-1] if topic.layout.is_resized else topic.numbers
    await make_groups(client, keys, topic.name, numbers, group, start)


async def make_groups(
    client: Client, keys: Keys, topic: str, numbers: Sequence[int], group: str, start: str
) -> list[int]:
    """The same in these partitions; returns those that had no such group."""
    replies = await client.pipelined(
        [("XGROUP", "CREATE", keys.stream(topic, number), group, start, "MKSTREAM") for number in numbers]
    )
    for reply in replies:
        if isinstance(reply, Exception) and "BUSYGROUP" not in str(reply):
            raise reply
    return [number for number, reply in zip(numbers, replies, strict=True) if not isinstance(reply, Exception)]


async def groups_of(client: Client, stream: str) -> list[dict[str, Any]]:
    """XINFO GROUPS of a stream, one dict a group; empty for a stream that does not exist."""
    return await _rows(client, "GROUPS", stream)


async def group_names(client: Client, keys: Keys, topic: str, partition: int) -> list[str]:
    """The groups of one partition."""
    return [row["name"].decode(errors="replace") for row in await groups_of(client, keys.stream(topic, partition))]


async def group_names_of(client: Client, keys: Keys, topic: str, partitions: Iterable[int]) -> set[str]:
    """The groups that are in any of these partitions, asked together."""
    replies = await ask_all(client, [("XINFO", "GROUPS", keys.stream(topic, number)) for number in partitions])
    return {as_dict(row)["name"].decode(errors="replace") for rows in replies for row in rows or ()}


async def require_group(client: Client, keys: Keys, topic: str, group: str) -> None:
    """Raise ConfigError for a group that never joined the topic: with a mistyped name a reset would make a new one,
    which holds back retention, and a pause would stop nothing."""
    names = sorted(await group_names(client, keys, topic, 0))
    if check_name("group", group) in names or await client.execute_command("EXISTS", keys.group(topic, group)):
        return
    raise ConfigError(f"topic {topic!r} has no group {group!r}: {suggestion(group, names, 'groups') or 'it has none'}")


async def consumers_of(client: Client, stream: str, group: str) -> list[dict[str, Any]]:
    """XINFO CONSUMERS, one dict a consumer; empty when the stream or the group does not exist."""
    return await _rows(client, "CONSUMERS", stream, group)


async def _rows(client: Client, *question: str) -> list[dict[str, Any]]:
    try:
        return [as_dict(row) for row in await client.execute_command("XINFO", *question)]
    except BrokerError as error:
        if is_missing(error):
            return []
        raise


def is_missing(reply: object) -> bool:
    """Whether the error of XINFO or XGROUP says that the stream, or the group, does not exist."""
    return isinstance(reply, BrokerError) and any(mark in str(reply).lower() for mark in MISSING)


async def trim(
    client: Client,
    keys: Keys,
    topic: str,
    partition: int,
    *,
    keep_age_ms: int,
    keep_length: int,
    exact: bool = False,
    archive: str = "off",
) -> Trimmed:
    """Remove entries that every group has settled, except the newest by age and length.

    With archive `required`, entries that an archive has not committed are kept, too.
    """
    word = b""
    for _ in range(TRIM_ATTEMPTS):
        groups = [row["name"] for row in await groups_of(client, keys.stream(topic, partition))]
        if not groups:
            return Trimmed(b"NO_GROUPS")
        script_keys = [part(topic, partition) for part in (keys.stream, keys.marks, keys.archived, keys.removed)]
        for group in [name.decode(errors="replace") for name in groups]:
            parts = (keys.retry, keys.errors, keys.cancels, keys.cancelled, keys.lease)
            script_keys += [part(topic, partition, group) for part in parts]
        word, *rest = await TRIM_PARTITION(
            client, script_keys, (keep_age_ms, keep_length, int(exact), archive, *groups)
        )
        if word == OK:
            return Trimmed(word, rest[0], is_more=rest[0] >= FULL_TRIM or bool(rest[2]))
        if word in (b"TOO_MANY_PARKED", b"NO_POSITION"):
            return Trimmed(word, 0, rest[0].decode(errors="replace"))
        if word != b"GROUPS_CHANGED":
            break
    return Trimmed(word)


# -- groups -----------------------------------------------------------------------------------------------------------


QUERY: Final = "query"
"""The distribution of a group that is a query of Spark: see `rsmq.pipeline`."""


class Joined(Partitioned, Protocol):
    """A topic whose bands a member has to know."""

    @property
    def layout(self) -> Layout: ...


async def join_group(client: Client, keys: Keys, topic: Joined, group: str, distribution: str) -> None:
    """Record the distribution of the group. Raises ConfigError when its other members use another one."""
    key, stored = keys.group(topic.name, group), stored_distribution(distribution, topic.layout)
    await client.execute_command("HSETNX", key, "created_ms", now_ms())
    found = ""
    while not found:  # a reset between the two commands removes what the other members use
        if await client.execute_command("HSETNX", key, "distribution", stored):
            return
        found = text(await client.execute_command("HGET", key, "distribution"))
    if plain_distribution(found) not in ("", distribution):
        raise ConfigError(
            f"group {group!r} of topic {topic.name!r} has distribution {plain_distribution(found)!r}, not "
            f"{distribution!r}: mixed members would break each other's promises. Use another group name, or stop all "
            f"members and run `rsmq group reset {topic.name} {group} --to earliest`"
        )
    if topic.layout.has_bands and found != stored:
        await client.execute_command("HSET", key, "distribution", stored)


async def set_paused(client: Client, keys: Keys, topic: str, group: str, *, paused: bool) -> None:
    """Stop or resume the delivery to a group; its members keep their leases and what is in flight."""
    await client.execute_command("HSET", keys.group(topic, group), "paused", int(paused))
    await announce(client, keys, topic, group)


async def reset_group(client: Client, keys: Keys, topic: Joined, group: str, start: str | datetime) -> None:
    """Let a group handle the topic again from `start` (`earliest`, `latest`, a stream id, a time).

    Pending and parked messages are dropped. Live members cannot settle the messages that they have in flight.
    Partitions that follow each other in a resize begin at once.
    """
    position, every, layout = start_id(start), dict[int, list[str]](), topic.layout
    for partition in topic.numbers:
        at = (topic.name, partition, group)
        parts = (keys.lease, keys.retry, keys.cancels, keys.cancelled, keys.waits, keys.calls)
        names = [part(*at) for part in parts]
        together = partition if not layout.is_resized else layout.root_of(partition) if client.is_cluster else 0
        every.setdefault(together, []).extend([keys.stream(topic.name, partition), *names])
    for names in every.values():
        await RESET_GROUP(client, names, (group, position))
    about = keys.group(topic.name, group)
    if topic.layout.has_bands:  # a worker that knows no bands is refused as before
        await client.execute_command("HSET", about, "distribution", WITH_BANDS)
    else:
        await client.execute_command("HDEL", about, "distribution")
    await announce(client, keys, topic.name, group)


RUN_KEPT_MS: Final = 2 * 3_600_000
"""For how long a deleted group is remembered: longer than `rsmq.sql` keeps the marks of settled messages."""


async def delete_group(client: Client, keys: Keys, topic: Partitioned, group: str) -> None:
    """Delete a group with its position, its retries and its dead letters. Stop its members first.

    The group's own entry goes last, so that an interrupted delete can be repeated. A group that is made again under
    this name soon begins a new run: stores outside may still know what the old one has handled. Raises ConfigError
    while outputs of its messages wait in an out-stream (on a cluster).
    """
    outs = [keys.out(topic.name, partition, group) for partition in topic.numbers]
    waiting = sum(await ask_all(client, [("XLEN", out) for out in outs])) if client.is_cluster else 0
    if waiting:
        raise ConfigError(
            f"{waiting} outputs of settled messages wait in the out-streams of group {group!r}: let its workers relay "
            f"them, or delete {outs[0].replace('.0}', '.*}')} by hand"
        )
    numbers, done = topic.numbers, set[int]()
    while left := [number for number in numbers if number not in done]:
        for partition in left:
            await _delete_from(client, keys, topic.name, partition, group)
        done.update(left)
        numbers = await _numbers(client, keys, topic.name)  # of a band that was added meanwhile, too
    await client.execute_command("UNLINK", keys.group(topic.name, group), keys.members(topic.name, group))
    await announce(client, keys, topic.name, group)


async def _delete_from(client: Client, keys: Keys, topic: str, partition: int, group: str) -> None:
    """Delete a group in one partition."""
    lease = keys.lease(topic, partition, group)
    await client.execute_command("UNLINK", *keys.of_group(topic, partition, group))
    await client.execute_command("HDEL", keys.removed(topic, partition), f"seen|{group}")
    await client.execute_command("HSET", lease, "run", now_ms())
    await client.execute_command("PEXPIRE", lease, RUN_KEPT_MS)
    try:
        await client.execute_command("XGROUP", "DESTROY", keys.stream(topic, partition), group)
    except BrokerError as error:
        if not is_missing(error):
            raise


async def _numbers(client: Client, keys: Keys, topic: str) -> Sequence[int]:
    """All partitions of a topic as it is now; none if it is not there."""
    partitions, layout = await client.execute_command("HMGET", keys.topic(topic), "partitions", "layout")
    return () if partitions is None else read_layout(topic, partitions, layout).numbers


MOST_PARKED: Final = 5000
"""`trim_partition.lua` reads so many parked messages of a group; of more it looks for single ones."""

FIELDS: Final = 500
"""Fields of a hash that one call reads, about."""


async def hash_fields(client: Client, key: str, pattern: str = "*") -> list[tuple[bytes, bytes]]:
    """The fields of a hash that match a pattern, with their values, read in pages; one that changes meanwhile may come
    twice."""
    found, cursor = dict[bytes, bytes](), b"0"
    while True:
        cursor, flat = await client.execute_command("HSCAN", key, cursor, "MATCH", pattern, "COUNT", FIELDS)
        found.update(zip(flat[::2], flat[1::2], strict=True))
        if cursor == b"0":
            return list(found.items())


AT_ONCE: Final = 16
"""Partitions whose newest entries are read together. The first of these that have an entry decide."""


def last_entries(replies: Iterable[Any]) -> list[Sequence[Any]]:
    """The last entry of each stream, from replies of XINFO STREAM; None is that of a stream that is not there."""
    found = [as_dict(reply).get("last-entry") for reply in replies if reply is not None]
    return [entry for entry in found if entry is not None]


def key_of_newest(entries: Iterable[Sequence[Any]]) -> str:
    """The id of the key with which the newest of some entries is encrypted; empty if it is not."""
    _, fields = max(entries, key=lambda entry: parse_stream_id(entry[0]))
    return key_of(by_name(fields or ()).get(ENC, b""))
