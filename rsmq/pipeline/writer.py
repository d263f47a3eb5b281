"""Batch and stream writes: what a task does with its rows, and what the driver makes of the tasks' reports."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Protocol

import anyio
import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rsmq.connect import Connector
from rsmq.errors import ConfigError
from rsmq.keys import Keys
from rsmq.pipeline.idempotence import SINKS
from rsmq.pipeline.link import Link
from rsmq.pipeline.option import Access, WriteOptions
from rsmq.pipeline.row import check_columns
from rsmq.pipeline.sink import Written
from rsmq.topic import Topic, Topics

log = logging.getLogger("rsmq.pipeline")


def prepared(options: WriteOptions, schema: StructType, overwrite: bool) -> WriteOptions:
    """The options, when these rows can be written in this way. Raises ConfigError before anything is touched."""
    if overwrite:
        raise ConfigError('a topic is appended to, never overwritten: use mode("append")')
    needs = list(SINKS[options.idempotence].needs)
    if options.target == "inbox":
        needs.append("device")
    elif options.topic is None:
        needs.append("topic")
    check_columns(schema, needs, f"target={options.target}, idempotence={options.idempotence}")
    return options


class Writer(DataSourceArrowWriter):
    """For `df.write`."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """The rows of one task."""
        return write_rows(self._options, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """All tasks have written."""
        conclude(self._options, messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """For `df.writeStream`."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """The rows of one task of one micro-batch."""
        return write_rows(self._options, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """All tasks of a micro-batch have written."""
        conclude(self._options, messages)


def write_rows(options: WriteOptions, batches: Iterator[pa.RecordBatch]) -> Written:
    """Put Arrow batches into topics or inboxes."""
    with Link(options.access) as link:
        sink = sink_for(options, link)
        for batch in batches:
            sink.put(batch)
        sink.flush()
        return sink.written


class Taker(Protocol):
    """What every sink does with rows."""

    written: Written

    def put(self, batch: pa.RecordBatch) -> None:
        """Take the rows of an Arrow batch."""

    def flush(self) -> None:
        """Send what is left."""


def sink_for(options: WriteOptions, link: Link) -> Taker:
    """What was asked for. Letters bring all of `rsmq.persistence`: loaded only where some are written."""
    if options.target == "inbox":
        inbox: Taker = import_module("rsmq.pipeline.inbox").Inbox(link, options)
        return inbox
    return SINKS[options.idempotence](link, options, lambda name: topic_named(options.access, name))


def topic_named(access: Access, name: str) -> Topic:
    """A topic, made with the defaults of the settings if it does not exist."""

    async def ensure() -> Topic:
        settings = access.settings()
        assert settings.url is not None
        async with Connector(settings.url, settings).connected() as client:
            return await Topics(client, Keys(settings.prefix), settings).ensure(name)

    return anyio.run(ensure)


def conclude(options: WriteOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Raise ConfigError when a source came through two tasks: then a mark of one hides messages of the other."""
    done = [message for message in messages if isinstance(message, Written)]
    times = Counter(pair for written in done for pair in written.pairs)
    twice = [f"{source or 'one source'} into {topic}.{number}" for (topic, number, source), n in times.items() if n > 1]
    if twice:
        raise ConfigError(
            f"idempotence=marker needs all rows of a source in one task, but {twice[0]} came through several "
            f"({len(twice)} such): messages may be missing. Repartition by topic and partition, sort, and write with "
            f"another jobId into a new topic"
        )
    log.info("%d messages stored, %d were there before", sum(w.stored for w in done), sum(w.skipped for w in done))
