"""Results of commands as tables for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rsmq.cli.output import print_json, print_line
from rsmq.model.words import duration, number, printable

PIPED_WIDTH = 1000
"""Without a terminal a table is as wide as its content, not cut at 80 columns."""
NOTHING = "-"


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
