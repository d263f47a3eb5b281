"""Batch and stream writes: each task puts its rows into a sink, and the driver checks the results of all tasks."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rsmq.errors import ConfigError
from rsmq.model.keys import Keys
from rsmq.model.words import count
from rsmq.pipeline.format.options import Access, WriteOptions
from rsmq.pipeline.format.plain_errors import plain_errors
from rsmq.pipeline.format.rows import check_columns
from rsmq.pipeline.format.task_connection import TaskConnection
from rsmq.pipeline.format.topic_sink import DIGEST, SINKS, TaskResult
from rsmq.redis.client.connector import Connector
from rsmq.redis.topics import Topic, Topics
from rsmq.redis.wire.url import database_of

log = logging.getLogger("rsmq.pipeline")


def check_write(options: WriteOptions, schema: StructType, overwrite: bool) -> WriteOptions:
    """Options that fit the rows. Raises ConfigError if these rows cannot be written with them."""
    if overwrite:
        raise ConfigError('a topic is appended to, never overwritten: use mode("append")')
    needs = list(SINKS[options.idempotence].needs)
    if options.target == "inbox":
        needs.append("device")
    elif options.topic is None:
        needs.append("topic")
    check_columns(schema, needs, f"target={options.target}, idempotence={options.idempotence}")
    return options


class TaskWriter:
    """Batch and stream writes share this: tasks write rows, and the driver checks the results of all tasks."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    @plain_errors
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task."""
        return write_rows(self._options, iterator)

    @plain_errors
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int = 0) -> None:  # noqa: N803
        """Check the results of all tasks, of a stream those of one micro-batch."""
        result = check_results(messages)
        if self._options.result_file is not None:  # Spark itself returns nothing to the program that writes
            Path(self._options.result_file).write_text(json.dumps({"stored": result.stored, "skipped": result.skipped}))


class BatchWriter(TaskWriter, DataSourceArrowWriter):
    """For `df.write`."""


class StreamWriter(TaskWriter, DataSourceStreamArrowWriter):
    """For `df.writeStream`."""


def write_rows(options: WriteOptions, batches: Iterator[pa.RecordBatch]) -> TaskResult:
    """Write Arrow batches into topics or inboxes."""
    with TaskConnection(options.access) as connection:
        if options.target == "inbox":  # only a write of letters loads `rsmq.persistence`
            sink: Any = import_module("rsmq.pipeline.format.inbox_sink").InboxSink(connection, options)
        else:
            sink = SINKS[options.idempotence](connection, options, lambda name: ensure_topic(options.access, name))
        for batch in batches:
            sink.put(batch)
        sink.flush()
        result: TaskResult = sink.result
        return result


def ensure_topic(access: Access, name: str) -> Topic:
    """A topic, created with the defaults of the settings if it does not exist."""

    async def ensure() -> Topic:
        settings = access.settings()
        assert settings.url is not None
        async with Connector(settings.url, settings).connected() as client:
            return await Topics(client, Keys(settings.prefix, database_of(settings.url)), settings).ensure(name)

    return anyio.run(ensure)


def check_results(messages: Sequence[WriterCommitMessage | None]) -> TaskResult:
    """The sum of all tasks.

    Raises ConfigError if a source or device came through two tasks: the mark of one hides messages of the other.
    """
    results = [message for message in messages if isinstance(message, TaskResult)]
    tasks = Counter(mark for result in results for mark in result.marks)
    twice = [f"{source or 'one source'} into {topic}.{number}" for (topic, number, source), n in tasks.items() if n > 1]
    if twice:
        raise ConfigError(
            f"idempotence=marker needs all rows of a source in one task, but {twice[0]} came through several "
            f"({len(twice)} such): messages may be missing. Repartition by topic and partition, sort, and write with "
            f"another jobId into a new topic"
        )
    digests = b"".join(result.devices for result in results)
    devices = len(digests) // DIGEST
    found = pa.Array.from_buffers(pa.int64(), devices, [None, pa.py_buffer(digests)])
    several = devices - pc.count_distinct(found).as_py()
    if several:
        raise ConfigError(
            f"target=inbox with idempotence=marker needs all rows of a device in one task, but {several} came through "
            f"several: letters may be missing. Write again with another jobId, after .repartition('device')"
            f".sortWithinPartitions('device', 'id_ms', 'id_seq')"
        )
    total = TaskResult(sum(result.stored for result in results), sum(result.skipped for result in results))
    log.info("%s stored, %d were stored before", count(total.stored, "message"), total.skipped)
    return total
