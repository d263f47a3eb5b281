"""The mark of a handled message: which message, in which run of its group, and under which epoch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from rsmq.model.clock import now_ms
from rsmq.model.message import Message
from rsmq.model.stream_id import parse_stream_id
from rsmq.sql.tables import LONGEST_ID

LANE: Final = ("deployment", "group_name", "topic", "partition_number")
KEY: Final = (*LANE, "id_ms", "id_seq", "run")
SIGNS: Final = (*KEY, "message_id")
"""What the row of a mark is recognised by: the first fields of `Mark`, in their order."""


class Mark(NamedTuple):
    """One message in one run of its group, and the epoch under which it is handled. Sorted as their keys are."""

    deployment: str
    group_name: str
    topic: str
    partition_number: int
    id_ms: int
    id_seq: int
    run: int
    message_id: str
    epoch: int

    @property
    def lane(self) -> dict[str, Any]:
        """Group, topic and partition."""
        return dict(zip(LANE, self, strict=False))

    @property
    def signs(self) -> tuple[Any, ...]:
        """The columns that identify its row."""
        return self[: len(SIGNS)]

    @property
    def row(self) -> dict[str, Any]:
        """The row of the table."""
        return {**dict(zip(SIGNS, self, strict=False)), "handled_ms": now_ms()}


class LaneRun(NamedTuple):
    """The fields that all marks of one partition share."""

    deployment: str
    group_name: str
    topic: str
    partition_number: int
    run: int
    epoch: int

    @property
    def lane(self) -> tuple[str, str, str, int]:
        """Group, topic and partition."""
        return self[0], self[1], self[2], self[3]


def lane_runs_of(messages: Iterable[Message]) -> list[LaneRun]:
    """That of each message, as it is now. What those of one partition have in common is read once: a batch has
    hundreds."""
    found, known = list[LaneRun](), dict[int, LaneRun]()
    for message in messages:
        origin = message.origin
        if (own := known.get(id(origin))) is None:
            own = known[id(origin)] = LaneRun(
                origin.deployment, origin.group, origin.topic, origin.partition, origin.run, origin.fence
            )
        found.append(own)
    return found


def mark_id_of(message: Message) -> tuple[int, int, str]:
    """The identity of a mark in its partition: the stream id and the message id. Another client
    may have written an id with a NUL, which PostgreSQL does not store."""
    return *parse_stream_id(message.entry_id), message.id[:LONGEST_ID].replace("\0", "\ufffd")


def marks_of(messages: Sequence[Message], lane_runs: Sequence[LaneRun] | None = None) -> list[Mark]:
    """The marks of messages, whose partitions and epochs may have been read before."""
    found = list[Mark]()
    for message, own in zip(messages, lane_runs or lane_runs_of(messages), strict=True):
        ms, seq, message_id = mark_id_of(message)
        found.append(Mark(*own.lane, ms, seq, own.run, message_id, own.epoch))
    return found
