"""Questions and commands about the streams behind a topic, with the raw replies parsed in one place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, Protocol

from rsmq.clock import epoch_ms
from rsmq.connect import Client
from rsmq.errors import BrokerError, ConfigError
from rsmq.keys import Keys
from rsmq.script import OK, TRIM_PARTITION, Value

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
NOTHING: Final = b"0-0"
"""Lower than the id of any entry."""

STREAM_ID: Final = re.compile(r"\d{1,20}(-\d{1,20})?", re.ASCII)
MOST_SEQUENCE: Final = 2**64 - 1
TRIM_ATTEMPTS: Final = 5


class Partitioned(Protocol):
    """What a topic must tell about itself here."""

    @property
    def name(self) -> str: ...
    @property
    def partitions(self) -> int: ...


class Trimmed(NamedTuple):
    """What a trim did: `word` is `OK`, `NO_GROUPS`, `TOO_MANY_PARKED` or `GROUPS_CHANGED`."""

    word: bytes
    removed: int = 0
    group: str = ""


def as_dict(flat: Sequence[Any]) -> dict[str, Any]:
    """A flat reply (name, value, name, value, ...) as a dict with text names. Raises BrokerError for half a pair."""
    if len(flat) % 2:
        raise BrokerError(f"an answer of names and values has {len(flat)} parts")
    pairs = iter(flat)
    return {name.decode(errors="replace"): value for name, value in zip(pairs, pairs, strict=True)}


def start_id(start: str | datetime) -> str:
    """Where a new or reset group begins, as XGROUP wants it: the last id that counts as delivered.

    `earliest` and `latest` speak for themselves; a stream id is exclusive (what comes after it is delivered); of a
    moment everything published at or after it is delivered.
    """
    if isinstance(start, datetime):
        ms = epoch_ms(start)
        return f"{ms - 1}-{MOST_SEQUENCE}" if ms > 0 else "0"
    if start == EARLIEST:
        return "0"
    if start == LATEST:
        return "$"
    if start == "$" or STREAM_ID.fullmatch(start):
        return start
    raise ConfigError(
        f"start {start!r} is not understood: use earliest, latest, a stream id such as 1718000000000-0, or a time"
    )


async def pipelined(client: Client, commands: Sequence[Sequence[Value]]) -> list[Any]:
    """Send commands together and return their replies. An error in a reply is returned in its place, not raised."""
    return await client.pipelined(commands)


async def ensure_groups(client: Client, keys: Keys, topic: Partitioned, group: str, start: str = "0") -> None:
    """Make the group in every partition that has none; a group that exists keeps its place."""
    replies = await pipelined(
        client,
        [
            ("XGROUP", "CREATE", keys.stream(topic.name, partition), group, start, "MKSTREAM")
            for partition in range(topic.partitions)
        ],
    )
    for reply in replies:
        if isinstance(reply, Exception) and "BUSYGROUP" not in str(reply):
            raise reply


async def groups_of(client: Client, stream: str) -> list[dict[str, Any]]:
    """XINFO GROUPS of a stream, one dict a group; empty for a stream that does not exist."""
    rows = await _unless_missing(client, "GROUPS", stream)
    return [as_dict(row) for row in rows or ()]


async def group_names(client: Client, keys: Keys, topic: str, partition: int) -> list[str]:
    """The groups of one partition."""
    return [row["name"].decode() for row in await groups_of(client, keys.stream(topic, partition))]


async def consumers_of(client: Client, stream: str, group: str) -> list[dict[str, Any]]:
    """XINFO CONSUMERS, one dict a consumer; empty when the stream or the group does not exist."""
    rows = await _unless_missing(client, "CONSUMERS", stream, group)
    return [as_dict(row) for row in rows or ()]


async def stream_info(client: Client, stream: str) -> dict[str, Any] | None:
    """XINFO STREAM, or None for a stream that does not exist."""
    flat = await _unless_missing(client, "STREAM", stream)
    return None if flat is None else as_dict(flat)


async def _unless_missing(client: Client, *question: str) -> list[Any] | None:
    try:
        reply: list[Any] = await client.execute_command("XINFO", *question)
    except BrokerError as error:
        if is_missing(error):
            return None
        raise
    return reply


def is_missing(reply: object) -> bool:
    """Whether XINFO's error says that the stream, or the group, does not exist."""
    return isinstance(reply, BrokerError) and ("no such key" in str(reply).lower() or "NOGROUP" in str(reply))


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
    """Remove what every group of the partition has settled, except the newest of it by age and length.

    With archive `required` also except what some archive has not committed.
    """
    word = b""
    for _ in range(TRIM_ATTEMPTS):
        groups = await group_names(client, keys, topic, partition)
        if not groups:
            return Trimmed(b"NO_GROUPS")
        script_keys = [keys.stream(topic, partition), keys.marks(topic, partition), keys.archived(topic, partition)]
        script_keys.append(keys.removed(topic, partition))
        script_keys += [keys.retry(topic, partition, group) for group in groups]
        word, *rest = await TRIM_PARTITION(
            client, script_keys, (keep_age_ms, keep_length, int(exact), archive, *groups)
        )
        if word == OK:
            return Trimmed(word, rest[0])
        if word == b"TOO_MANY_PARKED":
            return Trimmed(word, 0, rest[0].decode())
        if word != b"GROUPS_CHANGED":
            break
    return Trimmed(word)
