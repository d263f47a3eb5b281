"""Who holds retention back: what groups and archives still need of a partition, and what the topic's limits keep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from rsmq.inspector.observer import ask_group, ask_partition, measure
from rsmq.inspector.state import Row
from rsmq.model.keys import Keys
from rsmq.model.packing import by_name
from rsmq.model.record import text
from rsmq.model.stream_id import is_stream_id, parse_stream_id
from rsmq.model.words import count, duration
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import MOST_PARKED, ask_all
from rsmq.redis.topics import Topic

NO_GROUP: Final = "no group exists yet: the first group will read from the oldest entry"


@dataclass(frozen=True, slots=True)
class GroupNeeds:
    """The oldest entries of a partition that one group still needs. An id is None where nothing of that kind exists."""

    group: str
    pending: int
    oldest_pending: str | None
    parked: int
    oldest_parked: str | None
    oldest_undelivered: str | None

    @property
    def oldest_ids(self) -> list[str]:
        """The oldest id of each kind that exists."""
        return [each for each in (self.oldest_pending, self.oldest_parked, self.oldest_undelivered) if each]

    @property
    def is_holding(self) -> bool:
        """Whether this group keeps any entry from being trimmed."""
        return bool(self.oldest_ids)

    @property
    def why(self) -> str:
        """The entries that it holds back, as text."""
        parts = {
            f"{self.pending} pending, the oldest is {self.oldest_pending}": self.oldest_pending,
            f"{self.parked} waiting for a retry, the oldest is {self.oldest_parked}": self.oldest_parked,
            f"not delivered from {self.oldest_undelivered} on": self.oldest_undelivered,
        }
        return "; ".join(text for text, oldest in parts.items() if oldest) or "has settled everything"

    def __str__(self) -> str:
        return f"{self.group}: {self.why}"


async def group_needs(client: Client, keys: Keys, topic: str, partition: int) -> list[GroupNeeds]:
    """The holds of each group of a partition. A group's part is one atomic read, so a message that is being parked
    or delivered again is always in it."""
    _, needs = await _measured(client, keys, topic, partition)
    return needs


async def _measured(client: Client, keys: Keys, topic: str, partition: int) -> tuple[str | None, list[GroupNeeds]]:
    """The oldest id of a partition, and what each of its groups needs."""
    (counts,), may_run_scripts = await measure(client, [ask_partition(keys, topic, partition)])
    rows: list[Row] = counts[5:]
    calls = [ask_group(keys, topic, partition, row, MOST_PARKED) for row in rows]
    replies, _ = await measure(client, calls, may_run_scripts=may_run_scripts)
    found = [_needs(row, reply) for row, reply in zip(rows, replies, strict=True) if reply is not None]
    return _text(counts[3]), found


def _needs(row: Row, reply: Row) -> GroupNeeds:
    oldest, undelivered, oldest_parked, parked, _dead, _owner, _epoch, _until, _due, _both, *counts = reply
    ids = _text(oldest), parked, _text(oldest_parked), _text(undelivered)
    return GroupNeeds(row[0].decode(errors="replace"), sum(counts[1::2]), *ids)


@dataclass(frozen=True, slots=True)
class RetentionHold:
    """Why entries of a partition are still there: who keeps them, from which id on, and why.

    `is_limit`: every group has settled them; the topic's own limits keep them for a replay. `message_id`: of the
    `oldest`; empty if its entry has gone meanwhile.
    """

    holder: str
    oldest: str
    why: str
    is_limit: bool = False
    message_id: str = ""


async def retention_holds(client: Client, keys: Keys, topic: Topic, partition: int) -> list[RetentionHold]:
    """All holders of entries in a partition, oldest id first: the first one holds retention back now."""
    oldest, groups = await _measured(client, keys, topic.name, partition)
    if oldest is None:
        return []
    found = [
        RetentionHold(
            f"group {needs.group}",
            min(needs.oldest_ids, key=_order),
            needs.why
            + await _unstarted(client, keys, topic, partition, needs)
            + await _unsent(client, keys, topic, partition, needs.group),
        )
        for needs in groups
        if needs.is_holding
    ]
    found += await _archive_holds(client, keys, topic, partition, oldest) if topic.archive == "required" else []
    found.sort(key=lambda hold: _order(hold.oldest))
    if not found or _order(oldest) < _order(found[0].oldest):
        found.insert(0, RetentionHold("retention", oldest, _limit(topic) if groups else NO_GROUP, is_limit=True))
    stream = keys.stream(topic.name, partition)
    rows = await ask_all(client, [("XRANGE", stream, hold.oldest, hold.oldest, "COUNT", 1) for hold in found])
    return [
        replace(hold, message_id=_message_id(*row[0]) if row else "") for hold, row in zip(found, rows, strict=True)
    ]


def _message_id(entry_id: bytes, fields: list[bytes]) -> str:
    return by_name(fields).get(b"id", entry_id).decode(errors="backslashreplace")


async def _unstarted(client: Client, keys: Keys, topic: Topic, partition: int, needs: GroupNeeds) -> str:
    """What the oldest pending message waits for, if it has not started."""
    if needs.oldest_pending is None:
        return ""
    stream, oldest = keys.stream(topic.name, partition), needs.oldest_pending
    rows = await client.execute_command("XPENDING", stream, needs.group, oldest, oldest, 1)
    is_put_aside = rows and rows[0][3] == 0
    return "; that one has not started: it waits for its key, a rate or its turn" if is_put_aside else ""


async def _unsent(client: Client, keys: Keys, topic: Topic, partition: int, group: str) -> str:
    """Outputs of the group that wait, as text: while their out-stream is full, further messages are not settled."""
    waiting = await client.execute_command("XLEN", keys.out(topic.name, partition, group)) if client.is_cluster else 0
    return (
        f"; {count(waiting, 'output waits', 'outputs wait')} in its out-stream (see `rsmq doctor`)" if waiting else ""
    )


async def _archive_holds(client: Client, keys: Keys, topic: Topic, partition: int, oldest: str) -> list[RetentionHold]:
    flat = await client.execute_command("HGETALL", keys.archived(topic.name, partition))
    if not flat:
        return [RetentionHold("archive", oldest, "required, but no archive has committed this partition yet")]
    found = []
    for name, committed in zip(flat[::2], flat[1::2], strict=True):
        if not is_stream_id(committed):
            found.append(RetentionHold(f"archive {text(name)}", oldest, f"has the position {text(committed)[:40]!r}"))
            continue
        after = b"(" + committed
        entries = await client.execute_command("XRANGE", keys.stream(topic.name, partition), after, "+", "COUNT", 1)
        following = _text(entries[0][0]) if entries else None
        if following is not None:
            why = f"has committed up to {committed.decode()}"
            found.append(RetentionHold(f"archive {text(name)}", following, why))
    return found


def _text(stream_id: bytes | None) -> str | None:
    return stream_id.decode() if stream_id else None


def _order(stream_id: str) -> tuple[int, int]:
    return parse_stream_id(stream_id.encode())


def _limit(topic: Topic) -> str:
    if topic.retention_length == 0:
        return "settled by all groups: a worker that serves the partition removes them in its next round"
    return (
        f"settled by all groups: kept for a replay for {duration(topic.retention_age)}, or until "
        f"{count(topic.retention_length, 'newer message is', 'newer messages are')} settled"
    )
