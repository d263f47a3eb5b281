"""Spark for the length of a command: loaded when it is needed, stopped in order, and words for what came of it."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib import import_module
from typing import Any

from pydantic import ByteSize

from rsmq.errors import ConfigError

EXTRA = ("pyspark", "py4j", "pyarrow", "matplotlib")


def load(name: str) -> Any:
    """A module of `rsmq.pipeline`, or ConfigError where the extra is not installed."""
    try:
        return import_module(f"rsmq.pipeline.{name}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in EXTRA:
            raise ConfigError(f"this needs Spark, and {package} is not installed: pip install 'rsmq[spark]'") from None
        raise


@contextmanager
def spark(master: str | None) -> Iterator[Any]:
    """A session of Spark: the one there is, or a new one for the length of the block."""
    # of a package that we do not use; under spark-submit it would stand in front of what --json prints
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    opener = load("session")
    is_ours = opener.SparkSession.getActiveSession() is None
    session = opener.open_session(master, "rsmq pipeline")
    import_module("rsmq.pipeline").register(session)
    for name in ("py4j", "pyspark"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what went wrong is said once, by us
    try:
        yield session
    finally:
        if is_ours:
            session.stop()


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or Ctrl-C has come: the batch in hand is left to the next run, which does it again."""
    seen: list[int] = []
    before = {
        number: signal.signal(number, lambda each, _: seen.append(each)) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def counted(number: int, one: str, many: str) -> str:
    """A number of things."""
    return f"{number} {one if number == 1 else many}"


def size(count: int) -> str:
    """Bytes for people."""
    return ByteSize(count).human_readable()


def when(moment: datetime) -> str:
    """A time for people."""
    return moment.strftime("%Y-%m-%d %H:%M:%S")
