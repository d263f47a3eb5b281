"""Read-only questions about topics, groups, members and the server, answered with plain dataclasses.

Nothing here consumes, claims or writes; every question is a few pipelines, so it may be asked while all is on fire.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from rsmq.clock import monotonic
from rsmq.connect import Client, redact
from rsmq.embedded import EmbeddedServer
from rsmq.heartbeat.presence import listeners
from rsmq.keys import Keys
from rsmq.novelty import newer_commands
from rsmq.observer import Observer
from rsmq.preflight import gather, judge
from rsmq.script import Value
from rsmq.settings import Settings
from rsmq.snapshot import Snapshot
from rsmq.state import (
    GroupState,
    MemberState,
    PartitionState,
    ServerState,
    ShareState,
    TopicState,
    partition_state,
    read_info,
    share_state,
)
from rsmq.stream import as_dict, is_missing, pipelined
from rsmq.topic import Topic, Topics

__all__ = [
    "GroupState", "Inspector", "MemberState", "PartitionState", "ServerState", "ShareState", "TopicState", "installed",
]  # fmt: skip

PINGS: Final = 5


class Inspector:
    """Asks the questions. Errors of the connection are raised; what does not exist is None or an empty list."""

    def __init__(self, client: Client, keys: Keys, settings: Settings) -> None:
        self._client, self._keys, self._settings = client, keys, settings
        self._topics = Topics(client, keys, settings)

    async def snapshot(self, topics: Collection[str] | None = None) -> Snapshot:
        """Everything at once, in a few numbers a partition: what is looked at again and again."""
        return await Observer(self._client, self._keys, self._settings).look(topics)

    # -- topics ---------------------------------------------------------------------------------------------------

    async def topics(self) -> list[TopicState]:
        """All topics, by name."""
        states = [await self.topic(name) for name in await self._topics.names()]
        return [state for state in states if state is not None]

    async def topic(self, name: str) -> TopicState | None:
        """One topic, or None."""
        topic = await self._topics.find(name)
        if topic is None:
            return None
        streams = self._streams(topic)
        count = topic.partitions
        replies = await self._ask(  # no script, which would spare two payloads: a user who may only look runs none
            [("XINFO", "STREAM", stream) for stream in streams]
            + [("XINFO", "GROUPS", stream) for stream in streams]
            + [("ZCARD", self._keys.delayed(name, number)) for number in range(count)]
        )
        delayed = replies[2 * count :]
        partitions = tuple(partition_state(number, replies[number], delayed[number]) for number in range(count))
        groups = {as_dict(row)["name"].decode() for rows in replies[count : 2 * count] for row in rows or ()}
        length = sum(partition.length for partition in partitions)
        return TopicState(topic, length, sum(delayed), tuple(sorted(groups)), partitions)

    # -- groups ---------------------------------------------------------------------------------------------------

    async def groups(self, topic: str | None = None) -> list[GroupState]:
        """The groups of one topic, or of all."""
        names = await self._topics.names() if topic is None else [topic]
        found = [await self._topics.find(name) for name in names]
        return [state for each in found if each is not None for state in await self._groups_of(each)]

    async def group(self, topic: str, group: str) -> GroupState | None:
        """One group of one topic, or None."""
        return next((state for state in await self.groups(topic) if state.name == group), None)

    async def _groups_of(self, topic: Topic) -> list[GroupState]:
        streams = self._streams(topic)
        replies = await self._ask(
            [("XINFO", "GROUPS", stream) for stream in streams] + [("XLEN", stream) for stream in streams]
        )
        lengths = replies[topic.partitions :]
        rows: dict[str, dict[int, dict[str, Any]]] = {}
        for number, reply in enumerate(replies[: topic.partitions]):
            for row in map(as_dict, reply or ()):
                rows.setdefault(row["name"].decode(), {})[number] = row | {"length": lengths[number]}
        return [await self._group_state(topic.name, name, rows[name]) for name in sorted(rows)]

    async def _group_state(self, topic: str, group: str, rows: Mapping[int, dict[str, Any]]) -> GroupState:
        keys = self._keys
        time, about, members, *replies = await self._ask(
            [
                ("TIME",),
                ("HMGET", keys.group(topic, group), "distribution", "paused"),
                ("SMEMBERS", keys.members(topic, group)),
                *(("HMGET", keys.lease(topic, n, group), "owner", "epoch", "until_ms") for n in rows),
                *(("ZCARD", keys.retry(topic, n, group)) for n in rows),
                *(("XLEN", keys.dlq(topic, n, group)) for n in rows),
            ]
        )
        leases, parked, dead = (replies[at : at + len(rows)] for at in (0, len(rows), 2 * len(rows)))
        now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
        shares = tuple(
            share_state(number, row, lease, retries, letters, now_ms)
            for (number, row), lease, retries, letters in zip(rows.items(), leases, parked, dead, strict=True)
        )
        return GroupState(
            topic=topic,
            name=group,
            distribution=(about[0] or b"").decode(),
            is_paused=about[1] == b"1",
            members=tuple(sorted(member.decode() for member in members)),
            lag=sum(share.lag for share in shares),
            is_lag_exact=all(share.is_lag_exact for share in shares),
            pending=sum(share.pending for share in shares),
            parked=sum(share.parked for share in shares),
            dead_letters=sum(share.dead_letters for share in shares),
            shares=shares,
        )

    # -- members --------------------------------------------------------------------------------------------------

    async def members(self, topic: str | None = None, group: str | None = None) -> list[MemberState]:
        """The members of one group, one topic, or all."""
        groups = [state for state in await self.groups(topic) if group in (None, state.name)]
        return [member for state in groups for member in await self._members_of(state)]

    async def _members_of(self, group: GroupState) -> list[MemberState]:
        names = [self._keys.alive(group.topic, group.name, member) for member in group.members]
        replies = await self._ask([("GET", name) for name in names] + [("PTTL", name) for name in names])
        counts = await listeners(self._client, [self._keys.presence(member) for member in group.members])
        return [
            self._member_state(group, member, info, left_ms, count)
            for member, info, left_ms, count in zip(
                group.members, replies[: len(names)], replies[len(names) :], counts, strict=True
            )
        ]

    def _member_state(
        self, group: GroupState, member: str, info: bytes | None, left_ms: int, listening: int
    ) -> MemberState:
        told = read_info(info)
        heard_ago = self._settings.lease_ttl - timedelta(milliseconds=left_ms)
        return MemberState(
            topic=group.topic,
            group=group.name,
            id=member,
            handler=str(told.get("handler", "")),
            concurrency=concurrency if isinstance(concurrency := told.get("concurrency"), int) else 0,
            heard_ago=None if info is None else max(timedelta(0), heard_ago),
            is_present=listening > 0,
            partitions=tuple(share.partition for share in group.shares if share.owner == member),
        )

    # -- the server -----------------------------------------------------------------------------------------------

    async def server(self) -> ServerState:
        """The facts behind `rsmq doctor`."""
        facts = await gather(self._client, self._keys)
        topics = await self.topics()
        parser = type(getattr(self._client.nodes[0].connection_pool.make_connection(), "_parser", None)).__name__
        return ServerState(
            url=redact(self._client.url),
            server=", ".join(sorted({each.server for each in facts})),
            round_trip=min([await self._round_trip() for _ in range(PINGS)]),
            topics=len(topics),
            groups=sum(len(topic.groups) for topic in topics),
            python=platform.python_version(),
            redis_py=installed("redis"),
            hiredis=installed("hiredis"),
            is_hiredis_used="hiredis" in parser.lower(),
            embedded_directory=str(EmbeddedServer().directory) if self._settings.url is None else None,
            findings=tuple(judge(facts)),
            newer=await newer_commands(self._client),
        )

    async def _round_trip(self) -> timedelta:
        started = monotonic()
        await self._client.execute_command("PING")
        return timedelta(seconds=monotonic() - started)

    # -- asking ---------------------------------------------------------------------------------------------------

    def _streams(self, topic: Topic) -> list[str]:
        return [self._keys.stream(topic.name, partition) for partition in range(topic.partitions)]

    async def _ask(self, questions: Sequence[Sequence[Value]]) -> list[Any]:
        """The replies, None for a stream or group that does not exist. Raises any other error."""
        return list(answers(await pipelined(self._client, questions)))

    def __repr__(self) -> str:
        return f"<Inspector of {self._keys.prefix} at {redact(self._client.url)}>"


def answers(replies: Sequence[Any]) -> Iterator[Any]:
    """Replies with missing things as None."""
    for reply in replies:
        if isinstance(reply, Exception) and not is_missing(reply):
            raise reply
        yield None if isinstance(reply, Exception) else reply


def installed(package: str) -> str:
    """The version of a package, or `not installed`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
