"""What Spark says when something fails, as one line that says what to do.

A Spark error is a page of Java stack with the reason somewhere inside: an error of ours raised in a task, a file that
cannot be read, a full disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from rsmq import errors
from rsmq.errors import ConfigError, RsmqError
from rsmq.pipeline.offset import DataLoss

OURS: Final = re.compile(r"\brsmq\.(?:errors|pipeline\.offset)\.(\w+): ([^\n]+)")
RAISED: Final = re.compile(r"^(?!org\.|java\.|py4j\.|pyspark\.)([\w.]*(?:Error|Exception): [^\n]+)", re.MULTILINE)
"""The last line of a traceback of Python's."""
FILE: Final = re.compile(r"((?:file|hdfs|s3a|gs|abfss?):/[^\s'\",]+\.parquet)")
UNREADABLE: Final = ("FAILED_READ_FILE", "CANNOT_READ_FILE_FOOTER", "is not a Parquet file", "Could not read footer")
GONE: Final = ("FILE_NOT_EXIST", "PATH_NOT_FOUND", "FileNotFoundException")
FULL: Final = ("No space left on device", "Disk quota exceeded")
DENIED: Final = ("Permission denied", "AccessControlException")


@contextmanager
def spoken() -> Iterator[None]:
    """Raise one of our errors instead of one of Spark's."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise translate(error) from error


def translate(error: Exception) -> RsmqError:
    """One of our errors for one of Spark's."""
    text = "\n".join(texts(error))
    if found := OURS.findall(text):
        name, message = found[-1]
        kind = DataLoss if name == "DataLoss" else getattr(errors, name, RsmqError)
        return ConfigError(message) if issubclass(kind, ConfigError) else as_error(kind, message)
    path = next(iter(FILE.findall(text)), "")
    if any(sign in text for sign in FULL):
        return RsmqError(f"the disk is full{suffix(path)}: free some space and run it again, it goes on where it was")
    if path and any(sign in text for sign in UNREADABLE):
        return RsmqError(
            f"{path} cannot be read as Parquet: it is damaged. Put back a copy of it, or move it away and run this "
            f"again without its messages"
        )
    if any(sign in text for sign in GONE):
        return RsmqError(
            f"a file has gone meanwhile{suffix(path)}: run it again, and not beside `rsmq pipeline compact`"
        )
    if any(sign in text for sign in DENIED):
        return RsmqError(f"this user may not write or read there{suffix(path)}")
    return RsmqError(f"Spark failed: {(RAISED.findall(text) or [first_line(text)])[-1]}")


def as_error(kind: type[RsmqError], message: str) -> RsmqError:
    """An error of a kind, or a plain one if that kind wants to know more than a text."""
    try:
        return kind(message)
    except TypeError:
        return RsmqError(message)


def texts(error: BaseException | None) -> Iterator[str]:
    """What an error and its causes say."""
    while error is not None:
        yield str(error)
        error = error.__cause__


def suffix(path: str) -> str:
    """A file named in brackets, if one is known."""
    return f" ({path})" if path else ""


def first_line(text: str) -> str:
    """The first line that says anything."""
    lines = (line.strip() for line in text.splitlines())
    return next(
        (line for line in lines if line and not line.startswith("An error occurred while calling")), "no reason"
    )
