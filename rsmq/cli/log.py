"""The log of a command, on stderr: lines for people, or JSON for programs."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Literal

from pydantic_core import to_json

from rsmq.telemetry.context import about_message

Level = Literal["debug", "info", "warning", "error"]


class LineFormatter(logging.Formatter):
    """`12:00:00.123 INFO  rsmq.worker[4711] text`."""

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s[%(process)d] %(message)s", "%H:%M:%S")


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


def log_to_stderr(level: Level, *, as_json: bool) -> None:
    """Set up logging, unless the user's own module already has."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
