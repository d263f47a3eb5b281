"""Errors as Spark shows them: the sentence of rsmq comes first, not the traceback of a Python worker.

A Python process of Spark ends with its first error, and says it as text. PySpark leaves the traceback out if
`SPARK_HIDE_TRACEBACK` is set in that process. It is set here when an error of rsmq is raised: such an error says what
to do, and where in rsmq it was raised says no more. Errors of user code keep their traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Final, ParamSpec, TextIO, TypeVar

from rsmq.errors import RsmqError

P = ParamSpec("P")
T = TypeVar("T")

HIDE: Final = "SPARK_HIDE_TRACEBACK"
UNFLUSHED: Final = "PySpark daemon failed to flush the output to the worker process"


def plain_errors(method: Callable[P, T]) -> Callable[P, T]:
    """A method that a Python process of Spark calls: an error of rsmq is shown without its traceback."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except RsmqError:
            os.environ[HIDE] = "1"  # this process ends with the error
            raise

    return call


def plain_rows(batches: Iterator[T]) -> Iterator[T]:
    """What a task reads: an error of rsmq is shown without its traceback, and rows that Spark does not take are no
    error."""
    hide_closed_pipe()
    try:
        yield from batches
    except RsmqError:
        os.environ[HIDE] = "1"
        raise


def hide_closed_pipe() -> None:
    """From now on, stderr of this process leaves out what PySpark says when Spark has closed the pipe of a task.

    Spark does so when `limit` or `show` has enough rows.
    """
    if not isinstance(sys.stderr, WithoutClosedPipe):
        sys.stderr = WithoutClosedPipe(sys.stderr)


class WithoutClosedPipe:
    """A stream that drops the text about a closed pipe, and the line end behind it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._has_dropped = False

    def write(self, text: str) -> int:
        """Write, or drop."""
        is_line_end, self._has_dropped = self._has_dropped and text == "\n", False
        if text.startswith(UNFLUSHED) and "BrokenPipeError" in text:
            self._has_dropped = True
        elif not is_line_end:
            self._stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
