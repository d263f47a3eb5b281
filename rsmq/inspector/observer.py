"""Takes snapshots: everything that the inspector, `rsmq top`, the dashboard and the exporter show.

A snapshot takes four exchanges, however many topics there are: their names, their settings, the partitions, and what
each group has of each partition. Read-only scripts make it one command a partition, without payloads. A user who may
run no script (`rsmq-dashboard` of docs/security.md) gets the same from plain commands: more of them, and for each
partition the server sends up to three messages whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from rsmq.errors import ConfigError
from rsmq.inspector.schedules import ScheduleState, schedules_of
from rsmq.inspector.state import (
    UNKNOWN,
    GroupState,
    MemberState,
    PartitionState,
    Row,
    Snapshot,
    TopicState,
    group_partition,
    group_state,
    member_state,
    topic_state,
)
from rsmq.model.clock import monotonic, server_ms
from rsmq.model.keys import Keys, check_name
from rsmq.model.settings import Settings
from rsmq.model.stream_id import is_stream_id, parse_stream_id
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import MEASURE_GROUP_PARTITION, MEASURE_MEMBERS, MEASURE_PARTITION, Script, Value
from rsmq.redis.streams import SEALED, as_dict, ask_all
from rsmq.redis.topics import Topics

MOST_PARKED: Final = 100
"""Parked messages of each partition whose age is read: those that are due next."""
MOST_LOOKED_AT: Final = 1000
"""Pending messages of each partition that are looked at for one that does not wait for a time."""

Call = tuple[Script, tuple[str, ...], tuple[Any, ...]]
"""A script with its keys and arguments."""
Steps = Generator[list[tuple[Value, ...]], list[Any], Row | None]
"""The same as plain commands: yields commands, is sent their replies, and returns what the script would."""


class Observer:
    """Takes snapshots. Errors of the connection are raised; what is deleted between two exchanges is left out."""

    def __init__(self, client: Client, keys: Keys, settings: Settings) -> None:
        self._client = client
        self._keys = keys
        self._ttl = settings.lease_ttl
        self._topics = Topics(client, keys, settings)
        self._may_run_scripts = True

    async def snapshot(self, names: Collection[str] | None = None) -> Snapshot:
        """All topics, or some. O(partitions): 1 + topics + partitions + groups + partitions of each group commands."""
        at = monotonic()
        names = await self._topics.names() if names is None else [check_name("topic", name) for name in names]
        topics = sorted(await self._topics.find_all(names), key=lambda topic: topic.name)
        replies = iter(await self._measure([ask_partition(self._keys, t.name, n) for t in topics for n in t.numbers]))
        rows = [list(islice(replies, len(topic.numbers))) for topic in topics]
        states = [topic_state(topic, rows_of_topic) for topic, rows_of_topic in zip(topics, rows, strict=True)]
        groups, members = await self._groups(states, rows)
        return Snapshot(at, tuple(states), tuple(groups), tuple(members))

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Why topics are missing in the snapshots: another client has written into their records."""
        return self._topics.unreadable

    async def schedules(self, seen: Snapshot) -> list[ScheduleState]:
        """The schedules of the topics of a snapshot: one exchange more."""
        return await schedules_of(self._client, self._keys, [each.topic for each in seen.topics])

    async def _groups(
        self, topics: Sequence[TopicState], rows: Sequence[Sequence[Row]]
    ) -> tuple[list[GroupState], list[MemberState]]:
        found = [
            (topic.topic, group, parts)
            for topic, rows_of_topic in zip(topics, rows, strict=True)
            for group, parts in by_group(topic, rows_of_topic).items()
        ]
        calls = list[Call]()
        for topic, group, parts in found:
            calls.append(self._members(topic.name, group))
            calls += [
                ask_group(self._keys, topic.name, each.partition, row, MOST_PARKED, leaves_out_waits=True)
                for each, row in parts
            ]
        replies = iter(await self._measure(calls))
        groups, members = list[GroupState](), list[MemberState]()
        for topic, group, parts in found:
            about = next(replies)
            shares = [
                group_partition(partition, row, reply, about[0])
                for (partition, row), reply in zip(parts, islice(replies, len(parts)), strict=True)
                if reply is not None
            ]
            groups.append(state := group_state(topic, group, about, shares))
            member_rows = sorted(about[at : at + 4] for at in range(4, len(about), 4))
            members += [member_state(state, row, self._ttl) for row in member_rows]
        return groups, members

    def _members(self, topic: str, group: str) -> Call:
        keys = self._keys
        stems = (keys.alive(topic, group, ""), keys.vitals(topic, group, ""))
        return MEASURE_MEMBERS, (keys.group(topic, group), keys.members(topic, group), *stems), ()

    async def _measure(self, calls: Sequence[Call]) -> list[Any]:
        replies, self._may_run_scripts = await measure(self._client, calls, may_run_scripts=self._may_run_scripts)
        return replies

    def __repr__(self) -> str:
        return f"<Observer of {self._keys.prefix}>"


def ask_partition(keys: Keys, topic: str, number: int) -> Call:
    """The counts of one partition and of its groups."""
    return MEASURE_PARTITION, (keys.stream(topic, number), keys.delayed(topic, number)), ()


def ask_group(
    keys: Keys, topic: str, number: int, row: Row, most_parked: int, *, leaves_out_waits: bool = False
) -> Call:
    """The part of a partition that one group has; `row` is the group's row in the reply to `ask_partition`.

    `leaves_out_waits`: what waits for a time is not its oldest message.
    """
    at = (topic, number, row[0].decode(errors="replace"))
    parts = (keys.lease, keys.retry, keys.dlq, *((keys.waits,) if leaves_out_waits else ()))
    names = (keys.stream(topic, number), *[part(*at) for part in parts])
    return MEASURE_GROUP_PARTITION, names, (row[0], row[1], most_parked)


async def measure(client: Client, calls: Sequence[Call], *, may_run_scripts: bool = True) -> tuple[list[Any], bool]:
    """The replies, None for a group that does not exist any more; and whether the user may run scripts."""
    if may_run_scripts:
        try:
            return await ask_all(client, [script.full_command(keys, args) for script, keys, args in calls]), True
        except ConfigError:
            pass  # the ACL refuses scripts, or refuses the plain commands as well, which raise then
    return await run_together(client, [PLAIN[script.name](keys, args) for script, keys, args in calls]), False


def by_group(topic: TopicState, rows: Sequence[Row]) -> Mapping[str, list[tuple[PartitionState, Row]]]:
    """The partitions in which each group exists, with its row of MEASURE_PARTITION."""
    found: dict[str, list[tuple[PartitionState, Row]]] = {group: [] for group in topic.groups}
    for partition, reply in zip(topic.partitions, rows, strict=True):
        for row in reply[5:]:
            found[row[0].decode(errors="replace")].append((partition, row))
    return found


# -- the scripts as plain commands: the key permissions of docs/security.md, and no script --------------------------


async def run_together(client: Client, steps: Sequence[Steps]) -> list[Any]:
    """The results. The commands that all of them yield at a time share one exchange."""
    results: list[Any] = [None] * len(steps)
    replies: dict[int, list[Any] | None] = dict.fromkeys(range(len(steps)))
    while replies:
        asked = {}
        for number, sent in replies.items():
            try:
                asked[number] = next(steps[number]) if sent is None else steps[number].send(sent)
            except StopIteration as end:
                results[number] = end.value
        answers = iter(await ask_all(client, [command for commands in asked.values() for command in commands]))
        replies = {number: list(islice(answers, len(commands))) for number, commands in asked.items()}
    return results


def measure_partition(keys: Sequence[str], _: Sequence[Any]) -> Steps:
    """As measure_partition.lua."""
    stream, delayed = keys
    count, info, groups = yield [("ZCARD", delayed), ("XINFO", "STREAM", stream), ("XINFO", "GROUPS", stream)]
    if info is None:
        return [0, 0, count, b"", b""]
    about = as_dict(info)
    added, ends = about["entries-added"], [about[name] or [b""] for name in ("first-entry", "last-entry")]
    found: list[Any] = [added, about["length"], count, ends[0][0], ends[1][0]]
    for group in map(as_dict, groups or ()):
        lag, read = group["lag"], group["entries-read"]
        if lag is not None and read is None:
            read = added - lag  # a new group counts from its first read on
        numbers = [UNKNOWN if number is None else number for number in (read, lag)]
        found.append([group["name"], group["last-delivered-id"], *numbers, group["consumers"]])
    return found


def measure_group_partition(keys: Sequence[str], args: Sequence[Any]) -> Steps:
    """As measure_group_partition.lua. One exchange: a message that moves between two of the replies is in neither."""
    stream, lease, retry, dead_letters, *waits = keys
    group, delivered, most = args
    # the server refuses a range that begins after the largest id
    later = ("+", "-") if delivered == SEALED else (b"(" + delivered, "+")
    pending, following, parked, parked_count, dead, owner = yield [
        ("XPENDING", stream, group),
        ("XRANGE", stream, *later, "COUNT", 1),
        ("ZRANGEBYSCORE", retry, "-inf", "+inf", "LIMIT", 0, most),
        ("ZCARD", retry),
        ("XLEN", dead_letters),
        ("HMGET", lease, "owner", "epoch", "until_ms"),
    ]
    if pending is None:
        return None
    due = b""
    if waits:
        # 0 and less: its owner starts it; 1 and 2: due since an unknown moment
        first: tuple[Value, ...] = ("ZRANGEBYSCORE", *waits, "(2", "+inf", "WITHSCORES", "LIMIT", 0, 1)
        has_waits, dues = yield [("ZCARD", *waits), first]
        due = dues[1] if dues else b""
        rows = (yield [("XPENDING", stream, group, "-", "+", MOST_LOOKED_AT)])[0] if has_waits else ()
        if has_waits:  # those that wait for a retry in the night count here: the script asks for each
            pending[1] = next((row[0] for row in rows if row[3] > 0), b"")
    ids = [each for member in parked if is_stream_id(each := member.partition(b"|")[0])]
    oldest = min(ids, key=parse_stream_id, default=b"")
    found = (yield [("XPENDING", stream, group, each, each, 1) for each in ids]) if ids else []
    both = int(parked_count * sum(map(bool, found)) / len(ids) + 0.5) if ids else 0
    fields = [value or default for value, default in zip(owner, (b"", b"0", b"0"), strict=True)]
    counts = [part for name, count in pending[3] or () for part in (name, int(count))]
    ends = (pending[1] or b"", following[0][0] if following else b"", oldest)
    return [*ends, parked_count, dead, *fields, due, both, *counts]


def measure_members(keys: Sequence[str], _: Sequence[Any]) -> Steps:
    """As measure_members.lua."""
    group, members, alive, vitals = keys
    time, about, names = yield [("TIME",), ("HMGET", group, "distribution", "paused", "holds"), ("SMEMBERS", members)]
    prefixes = (("GET", alive.encode()), ("PTTL", alive.encode()), ("GET", vitals.encode()))
    replies = iter((yield [(command, prefix + name) for name in names for command, prefix in prefixes]))
    found: list[Any] = [server_ms(time), *(value or b"" for value in about)]
    for name in names:
        info, left_ms, lag = islice(replies, 3)
        found += [name, info or b"", left_ms, lag or b""]
    return found


PLAIN: Final[Mapping[str, Callable[[Sequence[str], Sequence[Any]], Steps]]] = {
    MEASURE_PARTITION.name: measure_partition,
    MEASURE_GROUP_PARTITION.name: measure_group_partition,
    MEASURE_MEMBERS.name: measure_members,
}
