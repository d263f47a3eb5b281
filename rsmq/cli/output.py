"""The output of commands: lines for people, JSON for programs."""

from __future__ import annotations

import sys
from base64 import b64encode
from typing import Any

import typer
from pydantic_core import from_json, to_json

from rsmq.errors import ConfigError
from rsmq.model.message import JSON
from rsmq.model.words import printable


def print_line(text: str) -> None:
    """A line on stdout, in its encoding: typer.echo would write UTF-8 where that is ASCII."""
    print(text, flush=True)


def print_json(value: Any, *, is_line: bool = False) -> None:
    """A value as JSON: dataclasses as objects, times in ISO 8601, durations as seconds. `is_line`: on one line."""
    text = to_json(value, indent=None if is_line else 2, timedelta_mode="float", fallback=str)
    print_line(text.decode())


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


def as_line(data: bytes | None, sealed: str = "") -> str:
    """A payload for people."""
    if sealed:
        return f"({printable(sealed)})"
    return "(none)" if data is None else printable(data.decode(errors="backslashreplace"))


def as_data(data: bytes | None, content_type: str | None = JSON, sealed: str = "") -> dict[str, Any]:
    """A payload inside JSON: `data` is its value where it is JSON, its text where it is only UTF-8, and null for a
    message without a payload. What is neither is `data_base64`. `content_type`: None if it is not known. `sealed`: why
    it cannot be decoded, such as `encrypted (k7)`."""
    if sealed:
        return {"data": None, "sealed": sealed}
    if data is None:
        return {"data": None}
    if content_type is None or content_type == JSON or content_type.endswith("+json"):
        try:
            return {"data": from_json(data, allow_inf_nan=False)}
        except ValueError:
            pass
    try:
        return {"data": data.decode()}
    except UnicodeDecodeError:
        return {"data_base64": b64encode(data).decode()}
