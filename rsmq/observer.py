"""Takes snapshots: everything that `rsmq top` and the dashboard show, at the price of a few numbers a partition.

A refresh is four exchanges, however many topics there are: their names, their settings, the partitions, and what each
group has of each partition. No payload is sent, nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from rsmq.clock import monotonic
from rsmq.connect import Client
from rsmq.keys import Keys
from rsmq.script import MEASURE_MEMBERS, MEASURE_PARTITION, MEASURE_SHARE, Value
from rsmq.settings import Settings
from rsmq.snapshot import GroupPoint, MemberPoint, SharePoint, Snapshot, StreamPoint, TopicPoint
from rsmq.stream import is_missing

MOST_PARKED: Final = 100
"""Parked messages whose age is looked at, of each partition: those that are due next."""
UNKNOWN: Final = -1

Row = Sequence[Any]
Place = tuple[str, str, int]
"""Topic, group, partition."""


class Observer:
    """Looks. Errors of the connection are raised; what vanishes between two questions is left out."""

    def __init__(self, client: Client, keys: Keys, settings: Settings) -> None:
        self._client, self._keys, self._settings = client, keys, settings

    async def look(self, topics: Collection[str] | None = None) -> Snapshot:
        """Everything, or some topics only. O(partitions) commands: 1 + topics + partitions + groups + shares."""
        at = monotonic()
        sizes = await self._sizes(await self._names() if topics is None else topics)
        places = [(topic, number) for topic, count in sizes.items() for number in range(count)]
        measured = dict(zip(places, await self._ask(map(self._partition, places)), strict=True))
        rows = {
            (topic, row[0].decode(), number): row
            for (topic, number), reply in measured.items()
            for row in (reply or ())[3:]
        }
        groups = sorted({(topic, group) for topic, group, _ in rows})
        about, shares = await self._groups(groups, rows)
        return Snapshot(at, tuple(self._topic(topic, measured, groups, about, shares) for topic in sorted(sizes)))

    async def _names(self) -> list[str]:
        return sorted(name.decode() for name in await self._client.execute_command("SMEMBERS", self._keys.topics))

    async def _sizes(self, names: Collection[str]) -> dict[str, int]:
        replies = await self._ask([("HGET", self._keys.topic(name), "partitions") for name in names])
        return {name: int(count) for name, count in zip(names, replies, strict=True) if count is not None}

    def _partition(self, place: tuple[str, int]) -> tuple[Value, ...]:
        return MEASURE_PARTITION.full_command((self._keys.stream(*place), self._keys.delayed(*place)), ())

    def _share(self, place: Place, row: Row) -> tuple[Value, ...]:
        topic, group, number = place
        keys, at = self._keys, (topic, number, group)
        names = (keys.stream(topic, number), keys.lease(*at), keys.retry(*at), keys.dlq(*at))
        return MEASURE_SHARE.full_command(names, (group, row[1], MOST_PARKED))

    def _members(self, topic: str, group: str) -> tuple[Value, ...]:
        keys = self._keys
        stems = (keys.alive(topic, group, ""), keys.vitals(topic, group, ""))
        return MEASURE_MEMBERS.full_command((keys.group(topic, group), keys.members(topic, group), *stems), ())

    async def _groups(
        self, groups: Sequence[tuple[str, str]], rows: Mapping[Place, Row]
    ) -> tuple[dict[tuple[str, str], Row], dict[Place, SharePoint]]:
        questions = [self._members(*group) for group in groups]
        questions += [self._share(place, row) for place, row in rows.items()]
        replies = await self._ask(questions)
        about = dict(zip(groups, replies[: len(groups)], strict=True))
        shares = {
            place: share_point(place[2], row, reply, about[place[:2]][0])
            for (place, row), reply in zip(rows.items(), replies[len(groups) :], strict=True)
            if reply is not None
        }
        return about, shares

    def _topic(
        self,
        topic: str,
        measured: Mapping[tuple[str, int], Row],
        groups: Sequence[tuple[str, str]],
        about: Mapping[tuple[str, str], Row],
        shares: Mapping[Place, SharePoint],
    ) -> TopicPoint:
        ttl = self._settings.lease_ttl
        return TopicPoint(
            name=topic,
            streams=tuple(
                StreamPoint(number, *reply[:3]) for (name, number), reply in measured.items() if name == topic
            ),
            groups=tuple(
                group_point(each, about[each], [share for at, share in shares.items() if at[:2] == each], ttl)
                for each in groups
                if each[0] == topic
            ),
        )

    async def _ask(self, questions: Any) -> list[Any]:
        """The replies, None for a group that does not exist any more. Raises any other error."""
        replies = await self._client.pipelined(list(questions))
        for reply in replies:
            if isinstance(reply, Exception) and not is_missing(reply):
                raise reply
        return [None if isinstance(reply, Exception) else reply for reply in replies]

    def __repr__(self) -> str:
        return f"<Observer of {self._keys.prefix}>"


def share_point(partition: int, row: Row, reply: Row, now_ms: int) -> SharePoint:
    """From the row of the partition's measure and the share's own."""
    pending, following, parked, parked_count, dead, owner, epoch, until_ms, *hands = reply
    ages = [int(found.partition(b"-")[0]) for found in (pending, following, parked) if found]
    _, _, read, lag = row
    return SharePoint(
        partition=partition,
        owner=owner.decode(),
        epoch=int(epoch),
        lease_left=timedelta(milliseconds=int(until_ms) - now_ms) if owner and int(until_ms) else None,
        lag=None if lag == UNKNOWN else lag,
        read=None if read == UNKNOWN else read,
        oldest=timedelta(milliseconds=max(0, now_ms - min(ages))) if ages else None,
        parked=parked_count,
        dead_letters=dead,
        in_hand={name.decode(errors="replace"): count for name, count in zip(hands[::2], hands[1::2], strict=True)},
    )


def group_point(group: tuple[str, str], about: Row, shares: Sequence[SharePoint], ttl: timedelta) -> GroupPoint:
    """From the measure of the members and the shares."""
    _, distribution, paused, *rows = about
    members = [member_point(rows[at : at + 4], ttl) for at in range(0, len(rows), 4)]
    return GroupPoint(
        topic=group[0],
        name=group[1],
        distribution=distribution.decode(),
        is_paused=paused == b"1",
        members=tuple(sorted(members, key=lambda member: member.id)),
        shares=tuple(sorted(shares, key=lambda share: share.partition)),
    )


def member_point(row: Row, ttl: timedelta) -> MemberPoint:
    """From its heartbeat. Another client's may hold anything."""
    member, info, left_ms, vitals = row
    told, lag_ms = read_object(info), read_object(vitals).get("loop_lag_ms")
    concurrency = told.get("concurrency")
    return MemberPoint(
        id=member.decode(errors="replace"),
        handler=str(told.get("handler", "")),
        concurrency=concurrency if isinstance(concurrency, int) else 0,
        heard_ago=max(timedelta(0), ttl - timedelta(milliseconds=left_ms)) if left_ms >= 0 else None,
        loop_lag=timedelta(milliseconds=lag_ms) if isinstance(lag_ms, int | float) else None,
    )


def read_object(text: bytes) -> dict[str, Any]:
    """A JSON object, or an empty one."""
    try:
        told = json.loads(text or b"{}")
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
