"""Filters that Spark pushes down, as a window: which topics, partitions and stream ids can match. Pure: no I/O here.

A window may be wider than its filters, never narrower: Spark applies every filter once more to the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from pyspark.sql import datasource as ds

from rsmq.model.clock import LATEST_MS
from rsmq.model.stream_id import LARGEST_PART, is_position, parse_stream_id

Id = tuple[int, int]
"""A stream id as two numbers."""

FIRST: Final[Id] = (0, 0)
LAST: Final[Id] = (LARGEST_PART, LARGEST_PART)
MOST_PARTITION: Final = 1 << 31
MICROSECOND: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ReadWindow:
    """What can match: topics (None: all), partitions and stream ids from the lowest to the highest, both included."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    lowest_partition: int = 0
    highest_partition: int = MOST_PARTITION
    lowest: Id = FIRST
    highest: Id = LAST

    @property
    def has_ids(self) -> bool:
        """Whether it limits stream ids."""
        return (self.lowest, self.highest) != (FIRST, LAST)

    def contains(self, topic: str, partition: int) -> bool:
        """Whether entries of this stream can match."""
        return (
            (self.topics is None or topic in self.topics)
            and (self.partitions is None or partition in self.partitions)
            and self.lowest_partition <= partition <= self.highest_partition
        )

    def between(self, lowest: Id, highest: Id) -> ReadWindow:
        """This window without lower and higher ids."""
        return replace(self, lowest=max(self.lowest, lowest), highest=min(self.highest, highest))


def read_window(filters: Iterable[ds.Filter]) -> ReadWindow:
    """The smallest window that is known to hold all that matches."""
    window = ReadWindow()
    for each in filters:
        name, values = column_and_values(each)
        if name in ("topic", "partition") and values is not None:
            window = with_values(window, name, values)
        elif name == "offset" and values and all(isinstance(v, str) and is_position(v) for v in values):
            ids = [parse_stream_id(value.encode()) for value in values]
            window = window.between(min(ids), max(ids))
        elif name == "partition":
            low, high = whole_limits(each, MOST_PARTITION)
            window = replace(
                window, lowest_partition=max(window.lowest_partition, low),
                highest_partition=min(window.highest_partition, high),
            )  # fmt: skip
        elif name in ("id_ms", "timestamp"):
            low, high = ms_limits(each, values, name)
            window = window.between((low, 0), (high, LARGEST_PART))
    return window


def column_and_values(each: ds.Filter) -> tuple[str | None, list[Any] | None]:
    """The column of a filter, and the values that it may have; None: any that the comparison allows."""
    attribute: tuple[str, ...] = getattr(each, "attribute", ())
    name = attribute[0] if len(attribute) == 1 else None
    if isinstance(each, ds.EqualTo | ds.EqualNullSafe):
        return name, [each.value]
    return name, list(each.value) if isinstance(each, ds.In) else None


def with_values(window: ReadWindow, name: str, values: list[Any]) -> ReadWindow:
    """The window with only these topics or partitions."""
    found = frozenset(values)
    if name == "topic":
        return replace(window, topics=found if window.topics is None else window.topics & found)
    return replace(window, partitions=found if window.partitions is None else window.partitions & found)


def whole_limits(each: ds.Filter, most: int) -> tuple[int, int]:
    """The lowest and the highest whole number that a comparison allows."""
    value = getattr(each, "value", None)
    if not isinstance(value, int):
        return 0, most
    match each:
        case ds.GreaterThan():
            return value + 1, most
        case ds.GreaterThanOrEqual():
            return value, most
        case ds.LessThan():
            return 0, value - 1
        case ds.LessThanOrEqual():
            return 0, value
    return 0, most


def ms_limits(each: ds.Filter, values: list[Any] | None, name: str) -> tuple[int, int]:
    """The lowest and the highest ms of a stream id that a filter on `id_ms` or `timestamp` allows."""
    if values is not None:
        times = [time for value in values if (time := scaled(value, name)) is not None]
        if not times or len(times) < len(values):
            return 0, LARGEST_PART
        return min(times)[0], open_end(max(times)[0])
    time = scaled(getattr(each, "value", None), name)
    if time is None:
        return 0, LARGEST_PART
    ms, is_whole = time
    match each:
        case ds.GreaterThan():
            return ms + 1, LARGEST_PART
        case ds.GreaterThanOrEqual():
            return (ms if is_whole else ms + 1), LARGEST_PART
        case ds.LessThan():
            return 0, open_end(ms - 1 if is_whole else ms)
        case ds.LessThanOrEqual():
            return 0, open_end(ms)
    return 0, LARGEST_PART


def scaled(value: Any, name: str) -> tuple[int, bool] | None:
    """A value as ms since 1970, rounded down, and whether it is a whole number of them. None: cannot be compared."""
    if name == "id_ms":
        return (value, True) if isinstance(value, int) else None
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    span = value - datetime.fromtimestamp(0, value.tzinfo)
    microseconds = (span.days * 86_400 + span.seconds) * MICROSECOND + span.microseconds
    ms, rest = divmod(microseconds, 1000)
    return min(ms, LATEST_MS - 1), rest == 0 and ms < LATEST_MS


def open_end(ms: int) -> int:
    """A highest ms. Ids beyond what a timestamp or a bigint holds are shown as the last one, so that one has no end."""
    return LARGEST_PART if ms >= LATEST_MS - 1 else ms
