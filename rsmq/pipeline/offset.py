"""Positions in streams, and what lies between two of them. Pure: no I/O here.

A position is a stream id together with the count of entries ever added up to it (`XINFO STREAM entries-added`). The
difference of two counts says how many entries a range must yield, so that what was trimmed or deleted before it was
read is noticed, exactly. Positions belong to a topic of one creation (its epoch): a topic that was deleted and made
again starts anew.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql.datasource import InputPartition

from rsmq.errors import ConfigError, RsmqError

log = logging.getLogger("rsmq.pipeline")

NO_ID: Final = "0-0"

Stream = tuple[str, int]
"""A topic and the number of one of its partitions."""


class DataLoss(RsmqError):
    """Entries that a range promised are not there any more, or more than it promised are."""


@dataclass(frozen=True, slots=True)
class Position:
    """After the entry `id`, the `added`-th that the stream has ever had.

    `since` is set once, when a stream is first seen: how many entries it had lost by then, which nobody was promised.
    """

    id: str
    added: int
    since: int = 0

    def to_json(self) -> dict[str, Any]:
        """Names sorted."""
        known: dict[str, Any] = {"added": self.added, "id": self.id}
        return known | {"since": self.since} if self.since else known


@dataclass(frozen=True)
class Offsets:
    """A position in each stream of a query, and the epoch of each topic.

    Spark compares offsets as text: `to_json` gives the same text for the same offsets, always.
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
    def from_json(cls, found: Mapping[str, Any]) -> Offsets:
        """The inverse. Raises ConfigError for what it has not written."""
        try:
            return cls(
                {topic: int(inner["epoch"]) for topic, inner in found.items()},
                {
                    (topic, int(name)): Position(str(value["id"]), int(value["added"]), int(value.get("since", 0)))
                    for topic, inner in found.items()
                    for name, value in inner.items()
                    if name != "epoch"
                },
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"the offsets of the checkpoint cannot be read ({type(error).__name__}: {error}): restore it, or start "
                f"a new query with a new one"
            ) from None


@dataclass(frozen=True)
class Range(InputPartition):
    """The work of one task: the entries of a stream after `start`, up to and including `end`.

    `expected`: how many these must be. `is_strict`: whether it is an error when they are not.
    """

    topic: str
    partition: int
    start: str
    end: str
    expected: int
    is_strict: bool = True

    def check(self, found: int) -> None:
        """Raise DataLoss when what was found is not what was promised; without `is_strict` only log it."""
        if found == self.expected:
            return
        what = "trimmed before read" if found < self.expected else "the stream was made again or restored"
        text = (
            f"{self.topic}.{self.partition} after {self.start} up to {self.end}: expected {self.expected}, found "
            f"{found}: {what}"
        )
        if self.is_strict:
            raise DataLoss(
                f"{text}. Read sooner, keep more (`rsmq topic set {self.topic}`), or go on with failOnDataLoss=false"
            )
        log.warning("%s", text)


def ranges_between(start: Offsets, end: Offsets, *, is_strict: bool) -> list[Range]:
    """What lies between two offsets, a range a stream, empty ones left out.

    A stream that `start` does not know is read from where it was first seen. Raises DataLoss (if `is_strict`) for a
    topic that was made again; otherwise that is read from its beginning.
    """
    ranges = []
    for (topic, partition), upto in sorted(end.positions.items()):
        after = start.positions.get((topic, partition), Position(NO_ID, upto.since))
        if start.epochs.get(topic, end.epochs[topic]) != end.epochs[topic] or upto.added < after.added:
            if is_strict:
                raise made_again(topic, partition, after, upto)
            after = Position(NO_ID, upto.since)
        if upto.added > after.added:
            ranges.append(Range(topic, partition, after.id, upto.id, upto.added - after.added, is_strict))
    return ranges


def made_again(topic: str, partition: int, after: Position, upto: Position) -> DataLoss:
    """The error for a topic that is not the one that was read before."""
    return DataLoss(
        f"{topic}.{partition} was deleted and made again: {after.added} entries had been read of the old one, the new "
        f"one has had {upto.added}. Start a new query (a new checkpoint), or go on with failOnDataLoss=false"
    )


def shares(backlogs: Mapping[Stream, int], limit: int) -> dict[Stream, int]:
    """`limit` entries split over streams by their backlogs: exact in sum, and never more than a stream has."""
    total = sum(backlogs.values())
    if total <= limit:
        return dict(backlogs)
    split = {stream: limit * backlog // total for stream, backlog in backlogs.items()}
    # largest remainder first; the name decides between equals, so that a second try gives the same
    order = sorted(backlogs, key=lambda stream: (-(limit * backlogs[stream] % total), stream))
    for stream in order[: limit - sum(split.values())]:
        split[stream] += 1
    return split
