"""Sinks that store each row once: by its original stream id, by a mark of its source position, or by its message id."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rsmq.clock import to_ms
from rsmq.errors import ConfigError
from rsmq.pipeline.link import Link
from rsmq.pipeline.option import WriteOptions
from rsmq.pipeline.row import numbers, parts, positions
from rsmq.pipeline.sink import Append, Batch, Sink, Texts
from rsmq.script import PUBLISH_MARKED, PUBLISH_UNSEEN, RESTORE_MESSAGES, Value
from rsmq.topic import Topic


class Restore(Sink):
    """Under the original stream ids and in the original partitions: the ids themselves make it idempotent."""

    script = RESTORE_MESSAGES
    needs = ("partition", "id_ms", "id_seq")

    def _put_into(self, topic: Topic, batch: pa.RecordBatch) -> None:
        for _, rows in parts(batch, "partition"):
            ids = [f"{ms}-{seq}" for ms, seq in zip(numbers(rows, "id_ms"), numbers(rows, "id_seq"), strict=True)]
            self._append(topic, "", rows, ids)

    def _targets(self, topic: Topic, batch: pa.RecordBatch, keys: Texts, ids: Texts) -> list[int]:
        partition = numbers(batch, "partition")[0]
        if not 0 <= partition < topic.partitions:
            raise ConfigError(
                f"idempotence=id restores partition {partition}, but topic {topic.name!r} has {topic.partitions} "
                f"partitions: make it with as many as the original"
            )
        return [partition] * batch.num_rows

    def _refused(self, batch: Batch, reply: Any) -> None:
        if reply[0] == b"FOREIGN":
            raise ConfigError(
                f"{batch.topic.name}.{batch.partition} has newer entries than {reply[3].decode()}, and not this one: "
                f"idempotence=id needs an empty topic and rows sorted by id_ms, id_seq within a partition in one task"
            )
        super()._refused(batch, reply)


class Mark(Sink):
    """Exactly once: what is behind the mark that the job left at its last message is not appended again.

    All rows of one source (`topic`, `partition`) must come through one task, in rising order of (`id_ms`, `id_seq`):
    then a mark says everything. Rows out of order are refused here, sources in two tasks at the commit.
    """

    script = PUBLISH_MARKED
    needs = ("id_ms", "id_seq")

    def __init__(self, link: Link, options: WriteOptions, topic_named: Callable[[str], Topic]) -> None:
        super().__init__(link, options, topic_named)
        self._latest: dict[tuple[str, str], str] = {}

    def _put_into(self, topic: Topic, batch: pa.RecordBatch) -> None:
        has_source = {"topic", "partition"} <= set(batch.schema.names)
        for name, of_topic in parts(batch, "topic") if has_source else ((None, batch),):
            for number, rows in parts(of_topic, "partition") if has_source else ((None, of_topic),):
                source = "" if name is None or number is None else f"{name}.{number}"
                self._append(topic, source, rows, self._positions(topic.name, source, rows))

    def _positions(self, topic: str, source: str, rows: pa.RecordBatch) -> list[str]:
        """Where each row comes from, as text of fixed width. Raises ConfigError unless they rise."""
        column = positions(rows)
        found: list[str] = column.to_pylist()
        before = self._latest.get((topic, source), "")
        if found[0] <= before or not pc.all(pc.less(column[:-1], column[1:]), min_count=0).as_py():
            raise ConfigError(
                f"idempotence=marker: the rows {f'of {source} ' if source else ''}are out of order. Bring each source "
                f"into one task, .repartition('topic', 'partition'), and sort it there, "
                f".sortWithinPartitions('topic', 'partition', 'id_ms', 'id_seq')"
            )
        self._latest[topic, source] = found[-1]
        return found

    def _turns(self, batch: pa.RecordBatch) -> Iterable[int]:
        """By position: a row that comes again goes where its mark is."""
        return (ms + seq for ms, seq in zip(numbers(batch, "id_ms"), numbers(batch, "id_seq"), strict=True))

    def _head(self, batch: Batch) -> tuple[list[str], list[Value]]:
        jobs = self._link.keys.jobs(batch.topic.name, batch.partition)
        return [jobs], [f"{self._options.job_id}|{batch.source}"]

    def _read(self, batch: Batch, reply: Any) -> None:
        self.written.pairs.add((batch.topic.name, batch.partition, batch.source))
        super()._read(batch, reply)


class Dedupe(Sink):
    """Once per message id within a window."""

    script = PUBLISH_UNSEEN
    needs = ("id",)
    is_by_id = True

    def _head(self, batch: Batch) -> tuple[list[str], list[Value]]:
        keys, name, partition = self._link.keys, batch.topic.name, batch.partition
        return [keys.dedup(name, partition, each) for each in batch.ids], [to_ms(self._options.dedupe_window)]


SINKS: Final[dict[str, type[Sink]]] = {"none": Append, "id": Restore, "marker": Mark, "dedupe": Dedupe}
