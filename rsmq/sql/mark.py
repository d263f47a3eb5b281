"""The mark of a handled message: which message, in which run of its group, and under which epoch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from rsmq.model.clock import now_ms
from rsmq.model.message import Message
from rsmq.model.stream_id import parse_stream_id
from rsmq.sql.tables import LONGEST_ID

LANE: Final = ("group_name", "topic", "partition_number")
KEY: Final = (*LANE, "id_ms", "id_seq", "run")
SIGNS: Final = (*KEY, "message_id")
"""What the row of a mark is recognised by: the first fields of `Mark`, in their order."""


class Mark(NamedTuple):
    """One message in one run of its group, and the epoch under which it is handled. Sorted as their keys are."""

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
        """What its row is recognised by."""
        return self[: len(SIGNS)]

    @property
    def row(self) -> dict[str, Any]:
        """The row of the table."""
        return {**dict(zip(SIGNS, self, strict=False)), "handled_ms": now_ms()}


def marks_of(messages: Iterable[Message]) -> list[Mark]:
    """The marks of messages. What those of one partition have in common is read once: a batch has hundreds."""
    found, origin, lane, run, epoch = list[Mark](), None, ("", "", 0), 0, 0
    for message in messages:
        if message.origin is not origin:
            origin = message.origin
            lane, run, epoch = (origin.group, origin.topic, origin.partition), origin.run, origin.fence
        found.append(Mark(*lane, *parse_stream_id(message.entry_id), run, message.id[:LONGEST_ID], epoch))
    return found
