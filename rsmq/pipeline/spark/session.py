"""The Spark session of a command, and the progress bar that it shows on stderr.

The session is that of `spark-submit`, or a new one on this machine with small settings. There is no bar where stderr is
not a terminal, nor with --json.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

from pyspark.sql import SparkSession
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rsmq.pipeline.java import use_java
from rsmq.pipeline.python_program import VARIABLE
from rsmq.pipeline.source import PushingSource
from rsmq.pipeline.spark.errors import spark_errors
from rsmq.pipeline.spark.python import use_python

LOCAL: Final = "local[*]"
REMOTE: Final = "SPARK_REMOTE"
CONNECT_SCHEME: Final = "sc://"
"""Of the address of a server of Spark Connect."""
PUSH_DOWN: Final = "spark.sql.python.filterPushdown.enabled"
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.log.level": "ERROR",
    "spark.python.daemon.module": "rsmq.pipeline.daemon",
}
LOCAL_SETTINGS: Final = {
    "spark.log.level": "OFF",  # what fails is raised in Python, and would be logged twice before that
    # a few tasks on one machine: starting and planning cost more than they save
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "5000",
}
STDERR: Final = 2
NOISE: Final = re.compile(
    rb"^WARNING: Using incubator modules|^Using Spark's default log4j profile"
    rb"|WARN Utils: (Your hostname|Set SPARK_LOCAL_IP)"
    rb"|WARN NativeCodeLoader|^Setting (default log level|Spark log level) to|^To adjust logging level use"
)
"""What Spark says at each start, before its log level can be set."""
POLL_SECONDS: Final = 0.25

Show = Callable[[float, float | None, str], None]
"""Moves a bar: how much is done, of how much, a note. Without a total the bar only shows that work goes on."""


def open_session(master: str | None = None, name: str = "rsmq", settings: Mapping[str, str] = NOTHING) -> SparkSession:
    """A Spark session that knows `format("rsmq")`, from any Python: of a virtual environment, a notebook, an IDE, cron.

    It is the active session, that of `spark-submit`, or a new one. A new one runs on `master`: all cores of this
    machine by default, a cluster (`spark://host:7077`), or a server of Spark Connect (`sc://host:15002`), which the
    variable SPARK_REMOTE may name instead. A Spark of this machine runs on the Java that `rsmq doctor` shows, and its
    Python processes are this Python. `settings` are settings of Spark for a new session, such as
    `{"spark.driver.memory": "4g"}`. Raises RsmqError if there is no Java, if Spark Connect lacks packages, or if
    Spark's executors have no rsmq.
    """
    session = SparkSession.getActiveSession() or start_session(master, name, settings)
    register(session)
    return session


def start_session(master: str | None, name: str, settings: Mapping[str, str]) -> SparkSession:
    """A new session, with settings for small work on this machine."""
    chosen = dict(settings)
    remote = remote_address(master)
    if remote and remote.startswith(CONNECT_SCHEME):
        chosen["spark.remote"] = remote
    elif "PYSPARK_GATEWAY_PORT" not in os.environ:  # not started by spark-submit, which has its own Java and master
        use_java()
        os.environ.setdefault(VARIABLE, sys.executable)  # the default is any python3 on the PATH
        where = remote or master or LOCAL
        is_local = where.startswith("local[") or where == "local"
        chosen = SETTINGS | (LOCAL_SETTINGS if is_local else {}) | chosen
        chosen["spark.remote" if remote else "spark.master"] = where
    with spark_errors(), without_noise():
        return SparkSession.builder.appName(name).config(map=dict(chosen)).getOrCreate()


def remote_address(master: str | None) -> str | None:
    """The address of Spark Connect that a new session would use; None: it would use Spark itself."""
    if master:
        return master if master.startswith(CONNECT_SCHEME) else None
    return os.environ.get(REMOTE) or None


def register(spark: SparkSession) -> None:
    """Make `format("rsmq")` known to a session, from any Python, also to one of Spark Connect.

    On this machine the session's Python processes become this Python, unless PYSPARK_PYTHON is set. Elsewhere they are
    asked whether they have rsmq. Raises ConfigError, which says what to set, if they do not. Filters on topic,
    partition, stream id and time are pushed down from now on (`spark.sql.python.filterPushdown.enabled`).
    """
    use_python(spark)
    spark.conf.set(PUSH_DOWN, "true")
    spark.dataSource.register(PushingSource)


@contextmanager
def without_noise() -> Iterator[None]:
    """A Java that starts in the block has another stderr: what it always says is left out, the rest is passed on."""
    reading, writing = os.pipe()
    own = os.dup(STDERR)
    os.dup2(writing, STDERR)
    os.close(writing)
    threading.Thread(target=pass_on, args=(reading, own), name="rsmq-java", daemon=True).start()
    try:
        yield
    finally:
        os.dup2(own, STDERR)


def pass_on(reading: int, writing: int) -> None:
    """Copy lines to `writing`, without the noise, until all writers have ended."""
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            if not NOISE.search(line):
                os.write(writing, line)


@contextmanager
def progress_bar(title: str, is_quiet: bool = False, tasks_of: SparkSession | None = None) -> Iterator[Show]:
    """A bar for the length of the block. With `tasks_of` it follows the tasks that Spark runs in the block."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"),
               TimeElapsedColumn())  # fmt: skip
    is_hidden = is_quiet or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=is_hidden) as progress:
        task = progress.add_task(title, total=None, note="")

        def show(done: float, total: float | None, note: str) -> None:
            progress.update(task, completed=done, total=total, note=note)

        if is_hidden or tasks_of is None:
            yield show
            return
        is_over = threading.Event()
        follower = threading.Thread(target=follow_tasks, args=(tasks_of, show, is_over), name="rsmq-bar", daemon=True)
        follower.start()
        try:
            yield show
        finally:
            is_over.set()
            follower.join()


def follow_tasks(spark: SparkSession, show: Show, is_over: threading.Event) -> None:
    """Show how many tasks of the active stages are done, until `is_over` is set."""
    tracker = spark.sparkContext.statusTracker()
    while not is_over.wait(POLL_SECONDS):
        stages = [info for number in tracker.getActiveStageIds() if (info := tracker.getStageInfo(number)) is not None]
        total, done = (sum(getattr(each, name) for each in stages) for name in ("numTasks", "numCompletedTasks"))
        if total:
            show(done, total, f"{done} of {total} tasks")
