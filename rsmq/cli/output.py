"""The output of commands: lines for people, JSON for programs."""

from __future__ import annotations

import sys
from base64 import b64encode
from typing import Any

import typer
from pydantic_core import to_json

from rsmq.errors import ConfigError


def print_line(text: str) -> None:
    """A line on stdout."""
    typer.echo(text)


def print_json(value: Any, *, is_line: bool = False) -> None:
    """A value as JSON: dataclasses as objects, times in ISO 8601. `is_line`: on one line."""
    text = to_json(value, indent=None if is_line else 2, fallback=str)
    typer.echo(text.decode())


def print_result(value: Any, text: str, *, as_json: bool) -> None:
    """The result of a command: the value as JSON, or the text."""
    print_json(value) if as_json else print_line(text)


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
