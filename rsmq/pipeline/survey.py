"""What the driver asks before anything is read: which streams there are, how far they go, where a count ends."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rsmq.errors import BrokerError, ConfigError
from rsmq.pipeline.link import Link
from rsmq.pipeline.offset import NO_ID, Offsets, Position, Range, Stream
from rsmq.pipeline.option import Selection
from rsmq.script import SEEK_ENTRY
from rsmq.stream import EARLIEST, LATEST, as_dict, is_missing

MOST_PER_SEEK: Final = 2000
"""Entries that one script call walks over: a few milliseconds of the server's time."""


@dataclass(frozen=True, slots=True)
class State:
    """One stream at one moment."""

    last: str
    added: int
    length: int

    @property
    def lost(self) -> int:
        """How many of its entries are gone: trimmed, or deleted."""
        return self.added - self.length

    @property
    def first(self) -> Position:
        """Before its oldest entry."""
        return Position(NO_ID, self.lost)

    @property
    def end(self) -> Position:
        """After its newest entry."""
        return Position(self.last, self.added)


class Survey:
    """Questions about the streams of a selection."""

    def __init__(self, link: Link, selection: Selection) -> None:
        self._link, self._selection = link, selection

    def streams(self) -> dict[Stream, int]:
        """The selected streams with the epochs of their topics. Raises ConfigError for a topic that does not exist."""
        found = {}
        for topic, only in self._topics():
            flat = as_dict(self._link.ask("HGETALL", self._link.keys.topic(topic)))
            if "partitions" not in flat:
                if self._selection.pattern is not None:
                    continue  # deleted at this moment
                raise ConfigError(self._no_topic(topic))
            partitions = int(flat["partitions"])
            for number in range(partitions) if only is None else only:
                if number >= partitions:
                    raise ConfigError(f"assign: topic {topic!r} has {partitions} partitions, there is no {number}")
                found[topic, number] = int(flat.get("created_ms", 0))
        return found

    def state(self, stream: Stream) -> State:
        """How far a stream goes. One that has never had an entry does not exist yet."""
        try:
            info = as_dict(self._link.ask("XINFO", "STREAM", self._key(stream)))
        except BrokerError as error:
            if is_missing(error):
                return State(NO_ID, 0, 0)
            raise
        return State(info["last-generated-id"].decode(), int(info["entries-added"]), int(info["length"]))

    def ends(self) -> Offsets:
        """After the newest entry of every stream; `since` says what each had lost by then."""
        streams = self.streams()
        return Offsets(
            {topic: epoch for (topic, _), epoch in streams.items()},
            {stream: Position(state.last, state.added, state.lost) for stream, state in self._states(streams)},
        )

    def position(self, stream: Stream, bound: str) -> Position:
        """`earliest`, `latest`, or after a stream id."""
        state = self.state(stream)
        if bound == LATEST or not before(bound, state.last):
            return state.end
        if bound in (EARLIEST, NO_ID):
            return state.first
        newer, _ = self.seek(stream, bound, state.last, state.added)
        return Position(bound, state.added - newer)

    def seek(self, stream: Stream, after: str, upto: str, count: int) -> tuple[int, str]:
        """How many entries there are after `after` up to `upto`, `count` at most, and the id of the last of them.

        Walks on the server, in steps: no message is sent.
        """
        found = 0
        while found < count:
            step = min(MOST_PER_SEEK, count - found)
            walked, last = self._link.read(SEEK_ENTRY, [self._key(stream)], (after, upto, step))
            found, after = found + walked, last.decode()
            if walked < step:
                break
        return found, after

    def advance(self, stream: Stream, start: Position, count: int, state: State) -> Position:
        """The position `count` entries after `start`. What was trimmed in front of it counts as lost, not as read."""
        while True:
            lost = max(0, state.lost - start.added)
            found, last = self.seek(stream, start.id, state.last, count)
            again = self.state(stream)
            if max(0, again.lost - start.added) == lost or again.added < start.added:
                return Position(last, start.added + lost + found)
            state = again  # trimmed while we walked: what we counted may be gone

    def split(self, whole: Range, parts: int) -> Iterator[Range]:
        """A range in `parts` of about the same size, cut at entries, so that each is still exact."""
        left, after = whole.expected, whole.start
        for part in range(parts - 1):
            share = left // (parts - part)
            found, last = self.seek((whole.topic, whole.partition), after, whole.end, share)
            if share == 0 or found < share:
                break  # something is missing: the last part will say so
            yield Range(whole.topic, whole.partition, after, last, share, whole.is_strict)
            left, after = left - share, last
        yield Range(whole.topic, whole.partition, after, whole.end, left, whole.is_strict)

    def plan(self, ranges: list[Range], least: int) -> list[Range]:
        """The ranges, the largest of them cut until there are `least`."""
        total = sum(each.expected for each in ranges)
        if not total or len(ranges) >= least:
            return ranges
        size = -(-total // least)
        return [part for each in ranges for part in self.split(each, -(-each.expected // size))]

    def _states(self, streams: dict[Stream, int]) -> Iterator[tuple[Stream, State]]:
        return ((stream, self.state(stream)) for stream in streams)

    def _topics(self) -> list[tuple[str, tuple[int, ...] | None]]:
        selection = self._selection
        if selection.partitions:
            return list(selection.partitions)
        if selection.pattern is not None:
            return [(name, None) for name in self._names() if re.fullmatch(selection.pattern, name)]
        return [(name, None) for name in selection.topics]

    def _names(self) -> list[str]:
        return sorted(name.decode() for name in self._link.ask("SMEMBERS", self._link.keys.topics))

    def _no_topic(self, topic: str) -> str:
        near = difflib.get_close_matches(topic, self._names(), n=1)
        return f"there is no topic {topic!r}." + (f" Did you mean {near[0]}?" if near else " See `rsmq topic list`")

    def _key(self, stream: Stream) -> str:
        return self._link.keys.stream(*stream)


def before(one: str, other: str) -> bool:
    """Whether a stream id is lower than another."""
    return as_numbers(one) < as_numbers(other) if one not in (EARLIEST, LATEST) else True


def as_numbers(stream_id: str) -> tuple[int, int]:
    """A stream id as its two numbers."""
    ms, _, seq = stream_id.partition("-")
    return int(ms), int(seq or 0)
