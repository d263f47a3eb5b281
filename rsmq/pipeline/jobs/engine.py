"""Which engine does the work of a command: Arrow in this process, or Spark.

Spark needs most of a minute of a small machine to start. Arrow is for what one process does in less, or in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import date
from typing import Final, Literal

from pyspark.sql import SparkSession

from rsmq.errors import ConfigError
from rsmq.pipeline.format.options import read_options
from rsmq.pipeline.format.selected_streams import SelectedStreams
from rsmq.pipeline.format.task_connection import TaskConnection
from rsmq.pipeline.jobs.archive import ArchiveOptions
from rsmq.pipeline.jobs.arrow_archive import ArrowArchive
from rsmq.pipeline.jobs.compact import day_bytes
from rsmq.pipeline.jobs.replay import ReplayOptions

Engine = Literal["auto", "arrow", "spark"]

MOST_MESSAGES: Final = 5_000_000
"""Messages that are read by Arrow: about a minute of one core."""
MOST_BYTES: Final = 256 << 20
"""Compressed bytes of Parquet that are held in memory at once: a few gigabytes there."""


def uses_spark(engine: Engine, master: str | None, address: str | None, is_large: Callable[[], bool]) -> bool:
    """Whether Spark does the work.

    `auto`: for what is large, in a Spark that runs already or that `master` names, and for archives that are not on a
    disk of this machine, of which Spark knows the credentials. Raises ConfigError for options that exclude each other.
    """
    if engine == "arrow" and master is not None:
        raise ConfigError("--master says where Spark runs: leave it out, or use --engine spark")
    if engine != "auto":
        return engine == "spark"
    is_elsewhere = address is not None and not address.startswith("file:")
    has_spark = (
        master is not None or "PYSPARK_GATEWAY_PORT" in os.environ or SparkSession.getActiveSession() is not None
    )
    return has_spark or is_elsewhere or is_large()


def is_large_archive(options: ArchiveOptions) -> bool:
    """Whether there is much to archive."""
    source = read_options(options.source)
    known = ArrowArchive(options.target).positions(options.name).positions
    with TaskConnection(source.access) as connection:
        ends = SelectedStreams(connection, source.selection).ends().positions
    backlog = sum(end.added - (known[each].added if each in known else end.since) for each, end in ends.items())
    return backlog > MOST_MESSAGES


def is_large_compaction(address: str, until: date, topics: tuple[str, ...]) -> bool:
    """Whether a day does not fit into memory."""
    return day_bytes(ArrowArchive(address), until, topics) > MOST_BYTES


def is_large_replay(options: ReplayOptions) -> bool:
    """Whether a replay does not fit into memory, or needs SQL."""
    archive = ArrowArchive(options.archive)
    parts = archive.parts_between(options.topics, options.since, options.until)
    return options.where is not None or archive.size_of(parts) > MOST_BYTES
