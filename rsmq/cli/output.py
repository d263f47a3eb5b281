"""The output of commands: lines for people, JSON for programs, errors and the log on stderr."""

from __future__ import annotations

import logging
import sys
from base64 import b64encode
from datetime import UTC, datetime
from typing import Any, Literal

import typer
from pydantic_core import to_json

from rsmq.errors import ConfigError
from rsmq.telemetry.context import about_message

Level = Literal["debug", "info", "warning", "error"]


def print_line(text: str) -> None:
    """A line on stdout."""
    typer.echo(text)


def print_error(text: str) -> None:
    """A line on stderr."""
    typer.echo(f"rsmq: {text}", err=True)


def print_json(value: Any, *, is_line: bool = False) -> None:
    """A value as JSON: dataclasses as objects, times in ISO 8601. `is_line`: on one line."""
    text = to_json(value, indent=None if is_line else 2, fallback=str)
    typer.echo(text.decode())


def print_result(value: Any, text: str, *, as_json: bool) -> None:
    """The result of a command: the value as JSON, or the text."""
    print_json(value) if as_json else print_line(text)


def printable(text: str) -> str:
    """Text without control characters: payloads and keys may come from anywhere, and must not control the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def confirm(question: str, *, is_agreed: bool) -> None:
    """Ask before a command deletes something. Without a terminal `--yes` is required."""
    if is_agreed:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal to confirm it: use --yes")
    typer.confirm(question, abort=True, err=True)


def as_data(data: bytes | None) -> dict[str, Any]:
    """A payload inside JSON: `data` where it is UTF-8, otherwise `data_base64`."""
    try:
        return {"data": None if data is None else data.decode()}
    except UnicodeDecodeError:
        return {"data_base64": b64encode(data or b"").decode()}


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


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside a group of groups."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def exit_code(error: BaseException) -> int:
    """The exit code for an error: 2 for wrong use or configuration."""
    return 2 if any(isinstance(each, ConfigError) for each in leaves(error)) else 1
