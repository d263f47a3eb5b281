"""A streaming query as Spark asks for it, without Spark: quick, and each step is one call."""

from __future__ import annotations

import json
import pickle
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from rsmq.pipeline.format.offsets import Range
from rsmq.pipeline.format.reader import StreamReader
from rsmq.pipeline.source import RsmqSource

Offset = dict[str, Any]
ALL = ReadAllAvailable()


class Query:
    """What Spark does with a stream reader, without Spark: offsets as text between the calls, tasks from pickles."""

    def __init__(self, connection: dict[str, str], **options: object) -> None:
        source = RsmqSource({**connection, **{name: str(value) for name, value in options.items()}})
        self.reader: StreamReader = source.streamReader(source.schema())
        self.offset = self._text(self.reader.initialOffset())

    def batch(self, limit: ReadLimit = ALL) -> list[str]:
        """The values of one micro-batch; afterwards the query stands behind it."""
        end = self.latest(limit)
        values, self.offset = self.values(self.offset, end), end
        return values

    def latest(self, limit: ReadLimit = ALL) -> str:
        """How far the next micro-batch would go."""
        return self._text(self.reader.latestOffset(json.loads(self.offset), limit))

    def ranges(self, start: str, end: str) -> list[Range]:
        """The tasks between two offsets."""
        found = self.reader.partitions(json.loads(start), json.loads(end))
        return [each for each in found if isinstance(each, Range)]

    def values(self, start: str, end: str) -> list[str]:
        """What the tasks between two offsets read."""
        reader: StreamReader = pickle.loads(pickle.dumps(self.reader))
        tasks = self.ranges(start, end)
        return [value.decode() for task in tasks for each in reader.read(task) for value in each["value"].to_pylist()]

    @staticmethod
    def _text(offset: Offset) -> str:
        return json.dumps(offset)
