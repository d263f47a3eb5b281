"""Positions in streams, and the ranges between them. Pure: no I/O here.

A position is a stream id and the count of entries ever added up to it (`XINFO STREAM entries-added`). The difference of
two counts is how many entries a range must yield, so that entries trimmed or deleted before they were read are noticed
exactly. The epoch of a topic is its time of creation: a topic that was deleted and created again is another topic.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql.datasource import InputPartition

from rsmq.errors import ConfigError, RsmqError
from rsmq.model.words import count

log = logging.getLogger("rsmq.pipeline")

NO_ID: Final = "0-0"
GO_ON: Final = "continue with failOnDataLoss=false"
BEHIND: Final = "@behind"
"""Beside the topics in the newest offsets of a query's progress: how far the query is behind them. No topic has such a
name."""
NEW_QUERY: Final = "Start a new query (a new checkpoint)"

Stream = tuple[str, int]
"""A topic and the number of one of its partitions."""


class DataLoss(RsmqError):
    """A range holds fewer or more entries than expected."""


@dataclass(frozen=True, slots=True)
class Position:
    """After the entry `id`, the `added`-th entry that the stream ever had.

    `since` is set when a query first sees a stream: how many entries it had lost by then. The query does not miss them.
    """

    id: str
    added: int
    since: int = 0

    def to_json(self) -> dict[str, Any]:
        """Names sorted."""
        fields: dict[str, Any] = {"added": self.added, "id": self.id}
        return fields | {"since": self.since} if self.since else fields


@dataclass(frozen=True)
class Offsets:
    """A position in each stream of a query, and the epoch of each topic.

    Spark compares offsets as text, so `to_json` always gives the same text for the same offsets.
    """

    epochs: Mapping[str, int]
    positions: Mapping[Stream, Position]

    def to_json(self) -> dict[str, Any]:
        """`{"orders": {"0": {"added": 5, "id": "1718000000000-0"}, "epoch": 1718000000000}}`, names sorted."""
        return {
            topic: {
                str(partition): self.positions[topic, partition].to_json()
                for partition in sorted(number for name, number in self.positions if name == topic)
            }
            | {"epoch": self.epochs[topic]}
            for topic in sorted(self.epochs)
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Offsets:
        """The inverse of `to_json`. Raises ConfigError for anything else."""
        try:
            return cls(
                {topic: int(inner["epoch"]) for topic, inner in saved.items() if topic != BEHIND},
                {
                    (topic, int(name)): Position(str(value["id"]), int(value["added"]), int(value.get("since", 0)))
                    for topic, inner in saved.items()
                    for name, value in inner.items()
                    if topic != BEHIND and name != "epoch"
                },
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"the offsets of the checkpoint cannot be read ({type(error).__name__}: {error}): restore it, or start "
                f"a new query with a new one"
            ) from None


def behind(read: Offsets, newest: Offsets) -> dict[str, dict[str, float]]:
    """How far `read` is behind: messages, and seconds from the last one that was read to the newest, of each stream."""
    messages, seconds = list[int](), list[float]()
    for stream, end in newest.positions.items():
        at = read.positions.get(stream, Position(NO_ID, end.since))
        waiting = end.added - at.added if read.epochs.get(stream[0]) == newest.epochs[stream[0]] else end.added
        messages.append(max(0, waiting))
        spans = [int(position.id.partition("-")[0]) for position in (at, end)]
        seconds.append(max(0, spans[1] - spans[0]) / 1000 if waiting > 0 and spans[0] else 0.0)
    return {"messages": spread(messages) | {"sum": sum(messages)}, "seconds": spread(seconds)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """The least, the most and the average."""
    if not values:
        return {"min": 0, "max": 0, "avg": 0}
    return {"min": min(values), "max": max(values), "avg": sum(values) / len(values)}


@dataclass(frozen=True)
class Range(InputPartition):
    """The work of one task: the entries of a stream after `start`, up to and including `end`.

    `expected`: how many entries that must be. `is_strict`: raise an error if the count differs.
    """

    topic: str
    partition: int
    start: str
    end: str
    expected: int
    is_strict: bool = True

    def check(self, found: int) -> None:
        """Raise DataLoss if the count is not the expected one; without `is_strict` only log it."""
        if found == self.expected:
            return
        what = "trimmed before read" if found < self.expected else "the stream was created again or restored"
        text = (
            f"{self.topic}.{self.partition} after {self.start} up to {self.end}: expected {self.expected}, found "
            f"{found}: {what}"
        )
        if self.is_strict:
            raise DataLoss(f"{text}. Read sooner, keep more (`rsmq topic set {self.topic}`), or {GO_ON}")
        log.warning("%s", text)


def ranges_between(start: Offsets, end: Offsets, *, is_strict: bool) -> list[Range]:
    """The ranges between two offsets, one for each stream that has new entries.

    A stream that is not in `start` is read from where it was first seen. A topic that was created again raises DataLoss
    if `is_strict`, otherwise it is read from its beginning.
    """
    ranges = []
    for (topic, partition), upto in sorted(end.positions.items()):
        after = start.positions.get((topic, partition), Position(NO_ID, upto.since))
        if start.epochs.get(topic, end.epochs[topic]) != end.epochs[topic] or upto.added < after.added:
            if is_strict:
                had = count(after.added, "entry of the old topic was", "entries of the old topic were")
                raise DataLoss(
                    f"{topic}.{partition} was deleted and created again: {had} read, the new one has had "
                    f"{upto.added}. {NEW_QUERY}, or {GO_ON}"
                )
            after = Position(NO_ID, upto.since)
        if upto.added > after.added:
            ranges.append(Range(topic, partition, after.id, upto.id, upto.added - after.added, is_strict))
    return ranges


def split_limit(backlogs: Mapping[Stream, int], limit: int) -> dict[Stream, int]:
    """Split `limit` over streams by their backlogs. The sum is exact, and no stream gets more than its backlog."""
    total = sum(backlogs.values())
    if total <= limit:
        return dict(backlogs)
    split = {stream: limit * backlog // total for stream, backlog in backlogs.items()}
    # largest remainder first, then by name, so that a second attempt gives the same result
    order = sorted(backlogs, key=lambda stream: (-(limit * backlogs[stream] % total), stream))
    for stream in order[: limit - sum(split.values())]:
        split[stream] += 1
    return split
