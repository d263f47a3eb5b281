"""What commands print: tables for people, JSON for programs, errors as one line on stderr."""

from __future__ import annotations

import sys
from base64 import b64encode
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import typer
from pydantic_core import to_json
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rsmq.errors import ConfigError

PIPED_WIDTH = 1000
"""A pipe has no width: let a table be as wide as its content instead of cutting it at 80."""
NOTHING = "-"


def say(text: str) -> None:
    """One line on stdout, as it is."""
    typer.echo(text)


def complain(text: str) -> None:
    """A line on stderr."""
    typer.echo(f"rsmq: {text}", err=True)


def dump(value: Any, *, is_line: bool = False) -> None:
    """Anything as JSON: dataclasses as objects, times in ISO 8601. `is_line`: one object a line."""
    text = to_json(value, indent=None if is_line else 2, fallback=str)
    typer.echo(text.decode())


def tabulate(columns: Sequence[str], rows: Iterable[Sequence[object]], nothing: str) -> None:
    """A table; a column that starts with `#` holds numbers. Without rows the sentence `nothing`."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            Text(column.removeprefix("#")), justify="right" if column.startswith("#") else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row))
    if table.row_count == 0:
        say(nothing)
        return
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False).print(table)


def cell(value: object) -> str:
    """One value for people."""
    if value is None or value == "" or value == ():
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, timedelta):
        return span(value)
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ")
    if isinstance(value, tuple):
        return " ".join(printable(str(each)) for each in value)
    return printable(str(value))


def span(value: timedelta) -> str:
    """A time span for people, one unit."""
    seconds = value.total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if abs(seconds) >= 1 or seconds == 0 else f"{seconds * 1000:.3g} ms"


def printable(text: str) -> str:
    """Text that cannot steer a terminal: payloads and keys are other people's."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def confirm(question: str, *, is_agreed: bool) -> None:
    """Ask before something is destroyed. Without a terminal only `--yes` is an answer."""
    if is_agreed:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} Nobody can be asked here: say --yes")
    typer.confirm(question, abort=True, err=True)


def as_data(data: bytes | None) -> dict[str, Any]:
    """A payload inside JSON: `data` where it is UTF-8, otherwise `data_base64`."""
    try:
        return {"data": None if data is None else data.decode()}
    except UnicodeDecodeError:
        return {"data_base64": b64encode(data or b"").decode()}
