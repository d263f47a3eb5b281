"""The output of commands: lines and tables for people, JSON for programs, errors and the log on stderr."""

from __future__ import annotations

import logging
import sys
from base64 import b64encode
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import typer
from pydantic_core import to_json
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rsmq.errors import ConfigError
from rsmq.model.words import duration, number
from rsmq.telemetry.context import about_message

PIPED_WIDTH = 1000
"""Without a terminal a table is as wide as its content, not cut at 80 columns."""
NOTHING = "-"

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


def print_rows(
    value: Any, columns: Sequence[str], rows: Iterable[Sequence[object]], nothing: str, *, as_json: bool
) -> None:
    """The result of a command: the value as JSON, or its rows as a table."""
    print_json(value) if as_json else print_table(columns, rows, nothing)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], nothing: str) -> None:
    """A table; a column that starts with `#` holds numbers. Without rows it prints `nothing`."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            Text(column.removeprefix("#")), justify="right" if column.startswith("#") else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row))
    if table.row_count == 0:
        print_line(nothing)
        return
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False).print(table)


def cell(value: object) -> str:
    """A value as text."""
    if value is None or value == "" or value == ():
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, timedelta):
        return duration(value)
    if isinstance(value, int):
        return number(value)
    if isinstance(value, tuple):
        return " ".join(printable(str(each)) for each in value)
    return printable(str(value))


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
