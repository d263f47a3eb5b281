"""Tells a signal from an error of user code: both may raise KeyboardInterrupt or SystemExit inside a handler."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a process. Their handlers may raise: Python's own for SIGINT does."""

SignalHandler = Callable[[int, FrameType | None], Any]


class Marker:
    """A signal handler that calls the one before it and marks what that raises."""

    def __init__(self, before: SignalHandler) -> None:
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        try:
            self._before(number, frame)
        except BaseException as error:
            mark(error, number)
            raise

    def __repr__(self) -> str:
        return f"<Marker {self._before!r}>"


@contextmanager
def signal_errors_marked() -> Iterator[None]:
    """Mark errors that signal handlers raise inside the block. Only the main thread gets signals."""
    markers: list[tuple[signal.Signals, Marker, SignalHandler]] = []
    if threading.current_thread() is threading.main_thread():
        for number in STOPS:
            before = signal.getsignal(number)
            if callable(before) and not isinstance(before, Marker):
                markers.append((number, Marker(before), before))
                signal.signal(number, markers[-1][1])
    try:
        yield
    finally:
        for number, marker, before in markers:
            if signal.getsignal(number) is marker:
                signal.signal(number, before)


def mark(error: BaseException, number: int) -> BaseException:
    """Mark an error that a signal handler raises, and return it."""
    error.__dict__["rsmq_signal"] = number
    return error


def is_from_signal(error: BaseException) -> bool:
    """Whether a signal handler raised it."""
    return "rsmq_signal" in getattr(error, "__dict__", ())
