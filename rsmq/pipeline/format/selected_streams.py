"""The streams that a query reads: which there are, how far they go, and where to cut them into ranges."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rsmq.errors import BrokerError, ConfigError, NotPermitted
from rsmq.model.layout import is_unknown, read_layout
from rsmq.model.stream_id import LARGEST_PART, parse_stream_id
from rsmq.pipeline.format.columns import ALL_GROUPS
from rsmq.pipeline.format.offsets import NO_ID, Offsets, Position, Range, Stream
from rsmq.pipeline.format.options import TopicSelection
from rsmq.pipeline.format.push_down import ReadWindow
from rsmq.pipeline.format.task_connection import TaskConnection
from rsmq.redis.scripts import SEEK_ENTRY
from rsmq.redis.streams import EARLIEST, LATEST, as_dict, is_missing, newest_id

log = logging.getLogger("rsmq.pipeline")

MAX_SEEK: Final = 2000
"""Entries that one script call counts: a few milliseconds of the server's time."""


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """One stream at one moment: its newest id, how many entries were ever added, how many it holds, the oldest id."""

    last: str
    added: int
    length: int
    first: str | None = None

    @property
    def lost(self) -> int:
        """How many of its entries were trimmed or deleted."""
        return self.added - self.length


class SelectedStreams:
    """Questions about the streams of a selection. The driver asks them; nothing is read or changed."""

    def __init__(self, connection: TaskConnection, selection: TopicSelection) -> None:
        self._connection, self._selection = connection, selection

    def epochs(self) -> dict[Stream, int]:
        """The selected streams with the epochs of their topics. Raises ConfigError for a topic that does not exist."""
        found = {}
        for topic, chosen in self._topics():
            flat = as_dict(self._connection.ask("HGETALL", self._connection.keys.topic(topic)))
            if "partitions" not in flat:
                if self._selection.pattern is not None:
                    continue  # deleted at this moment
                near = difflib.get_close_matches(topic, self._names(), n=1)
                hint = f" Did you mean {near[0]}?" if near else " See `rsmq topic list`"
                raise ConfigError(f"there is no topic {topic!r}.{hint}")
            numbers = read_layout(topic, flat["partitions"], flat.get("layout")).numbers
            for number in numbers if chosen is None else chosen:
                if number not in numbers:
                    raise ConfigError(f"assign: topic {topic!r} has the partitions 0 to {numbers[-1]}, not {number}")
                found[topic, number] = int(flat.get("created_ms", 0))
        return found

    def info(self, stream: Stream) -> StreamInfo:
        """One stream now. A stream that never had an entry does not exist yet."""
        try:
            info = as_dict(self._connection.ask("XINFO", "STREAM", self._key(stream)))
        except BrokerError as error:
            if is_missing(error):
                return StreamInfo(NO_ID, 0, 0)
            raise
        first = info["first-entry"][0].decode() if info["first-entry"] else None
        last = newest_id(info)
        if last == NO_ID.encode() and int(info["entries-added"]):  # sealed by a resize, and all of it is trimmed
            last = self._connection.ask("HGET", self._connection.keys.removed(*stream), "end") or last
        return StreamInfo(last.decode(), int(info["entries-added"]), int(info["length"]), first)

    def ends(self) -> Offsets:
        """After the newest entry of every stream. `since` is what each stream had lost by then."""
        epochs = self.epochs()
        infos = {stream: self.info(stream) for stream in epochs}
        return Offsets(
            {topic: epoch for (topic, _), epoch in epochs.items()},
            {stream: Position(info.last, info.added, info.lost) for stream, info in infos.items()},
        )

    def position(self, stream: Stream, bound: str) -> Position:
        """The position of `earliest`, of `latest`, or after a stream id."""
        info = self.info(stream)
        if bound == LATEST or not is_before(bound, info.last):
            return Position(info.last, info.added)
        if bound in (EARLIEST, NO_ID):
            return Position(NO_ID, info.lost)
        if info.first is not None and is_before(bound, info.first):
            return Position(bound, info.lost)  # the usual case of a time before all of it: nothing to count
        newer, _ = self.seek(stream, bound, info.last, info.added)
        return Position(bound, info.added - newer)

    def cut(self, whole: Range, window: ReadWindow) -> Range | None:
        """The part of a range that is in a window, with its exact count; None if no entry is."""
        after = max(id_before(window.lowest), parse_stream_id(whole.start.encode()))
        upto = min(window.highest, parse_stream_id(whole.end.encode()))
        if after >= upto:
            return None
        stream, start, end = (whole.topic, whole.partition), stream_id(after), stream_id(upto)
        if not self._connection.ask("XRANGE", self._key(stream), f"({start}", end, "COUNT", 1):
            return None
        found, _ = self.seek(stream, start, end, whole.expected)
        return Range(whole.topic, whole.partition, start, end, found, whole.is_strict)

    def band(self, stream: Stream) -> str | None:
        """The band of a stream. None: its topic has no bands, or was deleted, or has lost which one it was."""
        topic, number = stream
        sizes, stored = self._connection.ask("HMGET", self._connection.keys.topic(topic), "partitions", "layout")
        layout = None if sizes is None or stored is None else read_layout(topic, sizes, stored)
        band = None if layout is None or not layout.has_bands else layout.band_of(number)
        return None if band is None or is_unknown(band) else band

    def cancelled(self, stream: Stream, after: str, upto: str) -> dict[bytes, str]:
        """The messages of a range that are cancelled or replaced, with the groups for which they are, as text.

        A user without the rights to ask for groups learns of none.
        """
        found: dict[bytes, set[str]] = {}
        try:
            rows = self._connection.ask("XINFO", "GROUPS", self._key(stream))
            names = [as_dict(row)["name"].decode(errors="replace") for row in rows]
            low, high = after.partition("-")[0], upto.partition("-")[0]
            for name in names:
                marks = as_dict(self._connection.ask("HGETALL", self._connection.keys.cancels(*stream, name)))
                waiting = [each.encode() for each, mark in marks.items() if mark == b"cancelled"]
                done = self._connection.ask("ZRANGEBYSCORE", self._connection.keys.cancelled(*stream, name), low, high)
                for entry_id in {*waiting, *done}:
                    found.setdefault(entry_id, set()).add(name)
        except NotPermitted as error:
            log.warning("column `cancelled` is empty: %s", error)
            return {}
        except BrokerError as error:
            if is_missing(error):
                return {}
            raise
        return {
            entry_id: ALL_GROUPS if len(groups) == len(names) else ",".join(sorted(groups))
            for entry_id, groups in found.items()
        }

    def seek(self, stream: Stream, after: str, upto: str, count: int) -> tuple[int, str]:
        """How many entries there are after `after` up to `upto`, `count` at most, and the id of the last of them.

        The server counts, in steps of `MAX_SEEK`: no message is sent.
        """
        found = 0
        while found < count:
            step = min(MAX_SEEK, count - found)
            counted, last = self._connection.read(SEEK_ENTRY, [self._key(stream)], (after, upto, step))
            found, after = found + counted, last.decode()
            if counted < step:
                break
        return found, after

    def advance(self, stream: Stream, start: Position, count: int, info: StreamInfo) -> Position:
        """The position `count` entries after `start`. Entries trimmed in front of it count as lost, not as read."""
        while True:
            lost = max(0, info.lost - start.added)
            found, last = self.seek(stream, start.id, info.last, count)
            again = self.info(stream)
            if max(0, again.lost - start.added) == lost or again.added < start.added:
                return Position(last, start.added + lost + found)
            info = again  # trimmed during the count: what was counted may be gone

    def split_until(self, ranges: list[Range], least: int) -> list[Range]:
        """The ranges, the large ones split until there are at least `least`."""
        total = sum(each.expected for each in ranges)
        if not total or len(ranges) >= least:
            return ranges
        size = -(-total // least)
        return [part for each in ranges for part in self._split(each, -(-each.expected // size))]

    def _split(self, whole: Range, parts: int) -> Iterator[Range]:
        """A range in `parts` of about the same size. Each cut is at an entry, so that each part has an exact count."""
        left, after = whole.expected, whole.start
        for part in range(parts - 1):
            count = left // (parts - part)
            found, last = self.seek((whole.topic, whole.partition), after, whole.end, count)
            if count == 0 or found < count:
                break  # entries are missing: the last part will report it
            yield Range(whole.topic, whole.partition, after, last, count, whole.is_strict)
            left, after = left - count, last
        yield Range(whole.topic, whole.partition, after, whole.end, left, whole.is_strict)

    def _topics(self) -> list[tuple[str, tuple[int, ...] | None]]:
        """The selected topics with the chosen partitions; None: all of them."""
        selection = self._selection
        if selection.partitions:
            return list(selection.partitions)
        if selection.pattern is not None:
            return [(name, None) for name in self._names() if re.fullmatch(selection.pattern, name)]
        return [(name, None) for name in selection.topics]

    def _names(self) -> list[str]:
        return sorted(name.decode() for name in self._connection.ask("SMEMBERS", self._connection.keys.topics))

    def _key(self, stream: Stream) -> str:
        return self._connection.keys.stream(*stream)


def id_before(entry_id: tuple[int, int]) -> tuple[int, int]:
    """The highest id that is lower."""
    ms, sequence = entry_id
    if sequence:
        return ms, sequence - 1
    return (ms - 1, LARGEST_PART) if ms else (0, 0)


def stream_id(numbers: tuple[int, int]) -> str:
    """Two numbers as a stream id."""
    return f"{numbers[0]}-{numbers[1]}"


def is_before(one: str, other: str) -> bool:
    """Whether a stream id is lower than another. `earliest` and `latest` count as lower."""
    return one in (EARLIEST, LATEST) or parse_stream_id(one.encode()) < parse_stream_id(other.encode())
