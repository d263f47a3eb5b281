"""Translates Spark's errors into errors of rsmq with one line that says what to do.

A Spark error is a page of Java stack. The reason is somewhere inside: an error of rsmq raised in a task, a file that
cannot be read, a full disk.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, ParseException, PySparkException, PySparkImportError
from pyspark.sql import DataFrame

from rsmq import errors
from rsmq.errors import ConfigError, RsmqError
from rsmq.pipeline.format.offsets import DataLoss

OWN_ERROR: Final = re.compile(rf"\b(?:{re.escape(errors.__name__)}|{re.escape(DataLoss.__module__)})\.(\w+): ([^\n]+)")
PYTHON_ERROR: Final = re.compile(r"^(?!org\.|java\.|py4j\.|pyspark\.)([\w.]*(?:Error|Exception): [^\n]+)", re.MULTILINE)
"""The last line of a Python traceback."""
FILE: Final = re.compile(r"((?:file|hdfs|s3a|gs|abfss?):/[^\s'\",]+\.parquet)")
UNREADABLE: Final = ("FAILED_READ_FILE", "CANNOT_READ_FILE_FOOTER", "is not a Parquet file", "Could not read footer")
GONE: Final = ("FILE_NOT_EXIST", "PATH_NOT_FOUND", "FileNotFoundException")
VALUE: Final = re.compile(r"'.*'", re.DOTALL)
"""In an error of a query: a value that it could not cast, divide or read. Names are in other quotes."""
FULL: Final = ("No space left on device", "Disk quota exceeded")
DENIED: Final = ("Permission denied", "AccessControlException")
DISK_IS_FULL: Final = "the disk is full{where}: free some space and run it again, it continues where it stopped"
FILE_IS_GONE: Final = (
    "a file was removed meanwhile{where}: run it again, but not at the same time as `rsmq pipeline compact`"
)
NOT_ALLOWED: Final = "this user has no permission to read or write there{where}"
OF_VALUES: Final = (
    "SQLSTATE: 22", "pyarrow.lib.Arrow", "DateTimeException", "NumberFormatException", "ArithmeticException",
)  # fmt: skip
"""Signs of such an error: 22 is the class of data exceptions."""
NO_WORKER: Final = "Python worker failed to connect back"
"""Spark gives a process that reads or writes ten seconds to start, and has no setting for that."""


@contextmanager
def spark_errors() -> Iterator[None]:
    """Raise an error of rsmq instead of one of Spark, or of a file that Arrow reads or writes."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        said, shows_value = translate(error), is_of_a_value(error)
        raise said from (None if shows_value else error)
    except OSError as error:
        raise of_files(error) from error


def of_files(error: OSError) -> RsmqError:
    """The error of rsmq for one of the operating system."""
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RsmqError(DISK_IS_FULL.format(where=where))
    if isinstance(error, FileNotFoundError):
        return RsmqError(FILE_IS_GONE.format(where=where))
    if isinstance(error, PermissionError):
        return RsmqError(NOT_ALLOWED.format(where=where))
    return RsmqError(f"the archive cannot be read or written: {first_line(str(error))}")


def filter_rows(rows: DataFrame, where: str | None) -> DataFrame:
    """The rows for which an SQL expression is true. Raises ConfigError for one that Spark does not understand."""
    try:
        return rows if where is None else rows.where(where)
    except (AnalysisException, ParseException) as error:
        raise ConfigError(f"--where {where!r} is not valid SQL: {first_line(str(error))}") from None


def translate(error: Exception) -> RsmqError:
    """The error of rsmq for one of Spark."""
    text = "\n".join(messages(error))
    if isinstance(error, PySparkImportError):
        return ConfigError(f"{first_line(text)} Spark Connect needs more packages: pip install 'pyspark[connect]'")
    if found := OWN_ERROR.findall(text):
        name, message = found[-1]
        kind = DataLoss if name == "DataLoss" else getattr(errors, name, RsmqError)
        try:
            return ConfigError(message) if issubclass(kind, ConfigError) else kind(message)
        except TypeError:  # its constructor takes fields instead of a text
            return RsmqError(message)
    path = next(iter(FILE.findall(text)), "")
    where = f" ({path})" if path else ""
    if any(sign in text for sign in FULL):
        return RsmqError(DISK_IS_FULL.format(where=where))
    if path and any(sign in text for sign in UNREADABLE):
        return RsmqError(
            f"{path} cannot be read as Parquet: it is damaged. Restore it from a copy, or move it away and run this "
            f"again without its messages"
        )
    if any(sign in text for sign in GONE):
        return RsmqError(FILE_IS_GONE.format(where=where))
    if any(sign in text for sign in DENIED):
        return RsmqError(NOT_ALLOWED.format(where=where))
    if NO_WORKER in text:
        return RsmqError(
            "Spark started a Python process that was not ready within ten seconds, as on a machine with too much other "
            "work: run it again, it continues where it stopped"
        )
    line = (PYTHON_ERROR.findall(text) or [first_line(text)])[-1]
    if is_of_a_value(error):
        return RsmqError(f"Spark failed: {VALUE.sub('...', line)}")
    return RsmqError(f"Spark failed: {line}")


def is_of_a_value(error: Exception) -> bool:
    """Whether a query did not get along with a value, which may be a part of a payload: such an error has it."""
    return any(sign in text for text in messages(error) for sign in OF_VALUES)


def messages(error: BaseException | None) -> Iterator[str]:
    """The messages of an error and its causes."""
    while error is not None:
        yield str(error)
        error = error.__cause__


def first_line(text: str) -> str:
    """The first line with content."""
    lines = (line.strip() for line in text.splitlines())
    return next(
        (line for line in lines if line and not line.startswith("An error occurred while calling")), "no reason"
    )
