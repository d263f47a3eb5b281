"""Keeps handlers of logging that raise errors from what logs: a log line is never worth a message or a lease."""

from __future__ import annotations

import logging
import sys
import traceback

_told = set[str]()
"""Errors that were printed: each once, for the next line will raise it again."""


class GuardedLogger(logging.Logger):
    """A logger whose handlers may raise errors. `logging` itself passes on what `emit` of a handler raises."""

    def callHandlers(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """Pass a record to the handlers; an error of one is printed, once, and ends there."""
        try:
            super().callHandlers(record)
        except Exception as error:
            if (text := f"{type(error).__name__}: {error}") not in _told and sys.stderr is not None:
                _told.add(text)
                sys.stderr.write(f"rsmq: a handler of logging has failed: {text}\n")
                traceback.print_exception(error)


def guard_loggers() -> None:
    """Guard the loggers of rsmq that there are by now."""
    for name, logger in list(logging.Logger.manager.loggerDict.items()):
        if name.partition(".")[0] == "rsmq" and type(logger) is logging.Logger:
            logger.__class__ = GuardedLogger
