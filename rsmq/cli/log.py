"""The log of a command, on stderr: lines for people, or JSON for programs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final, Literal

from pydantic_core import to_json

from rsmq.model.log_guard import guard_loggers
from rsmq.telemetry.context import about_message

Level = Literal["debug", "info", "warning", "error"]


CONTROLS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that move the cursor, colour or turn the text of a terminal; not the tab and line end of a traceback."""
FORGED: Final = re.compile(r"\n(?=\d\d:\d\d:\d\d)")
"""A line end before what looks like the beginning of a record."""


class LineFormatter(logging.Formatter):
    """`12:00:00.123 INFO  rsmq.worker[4711] text`.

    Errors of handlers may quote payloads, which may come from anywhere: control characters are escaped, and a further
    line that begins as a record does is indented.
    """

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s[%(process)d] %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The lines of a record."""
        text = super().format(record)
        if CONTROLS.search(text):
            text = CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
        return FORGED.sub("\n    ", text)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with topic, partition, group, id and attempt of the message; never its payload."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        line |= about_message(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return to_json(line, fallback=str).decode()


def stderr_handler(*, as_json: bool) -> logging.Handler:
    """A handler that writes to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter())
    return handler


def log_to_stderr(level: Level, *, as_json: bool) -> None:
    """Set up logging, for a command that loads no module of the user."""
    logging.basicConfig(level=level.upper(), handlers=[stderr_handler(as_json=as_json)])


@contextmanager
def logging_of_module(level: Level, *, as_json: bool) -> Iterator[None]:
    """Load a module of the user inside the block. If it sets up logging, that counts; else logs go to stderr.

    Its `basicConfig` would do nothing beside a handler of ours, and a handler that it adds would write each line twice.
    `dictConfig` switches off all loggers that it does not name: those of rsmq are switched on again.
    """
    ours, root, handler = logging.getLogger("rsmq"), logging.getLogger(), stderr_handler(as_json=as_json)
    handler.addFilter(lambda record: not root.handlers)
    before = ours.level
    ours.addHandler(handler)
    ours.setLevel(level.upper())
    try:
        yield
    finally:
        ours.removeHandler(handler)
        if ours.level == logging.getLevelName(level.upper()):
            ours.setLevel(before)
        for name, logger in logging.Logger.manager.loggerDict.items():
            if name.partition(".")[0] == "rsmq" and isinstance(logger, logging.Logger):
                logger.disabled = False
        if not root.handlers and not ours.handlers:
            log_to_stderr(level, as_json=as_json)
        guard_loggers()
