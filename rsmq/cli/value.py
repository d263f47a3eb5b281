"""Values on the command line: spans, moments, places in a topic, headers, payloads."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from typing import Any

import typer
from pydantic import TypeAdapter, ValidationError

from rsmq.stream import EARLIEST, LATEST, STREAM_ID

SPAN = TypeAdapter(timedelta)
RATE = re.compile(r"\d{1,9}(\.\d{1,6})?")
RATES = {"s": timedelta(seconds=1), "min": timedelta(minutes=1), "h": timedelta(hours=1)}


def parse_span(text: str) -> timedelta:
    """`PT5S` as a span, never negative; a bare number is no time."""
    try:
        if not text.upper().startswith("P"):
            raise ValueError(text)
        return SPAN.validate_python(text.upper())
    except (ValidationError, ValueError):
        raise typer.BadParameter(f"{text!r} is no time span: write PT5S, PT2M, PT1H or P1D (ISO 8601)") from None


def parse_moment(text: str) -> datetime:
    """`2026-01-31T12:00:00+01:00` as a moment; without a zone it names none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time: write 2026-01-31T12:00:00+01:00 (ISO 8601)") from None
    if moment.tzinfo is None:
        raise typer.BadParameter(f"{text!r} has no time zone: end it with Z or with one such as +01:00")
    return moment


def parse_rate(text: str) -> timedelta:
    """`50/s` as the span between two; a bare number is no rate."""
    number, _, unit = text.partition("/")
    if unit not in RATES or not RATE.fullmatch(number) or float(number) == 0:
        raise typer.BadParameter(f"{text!r} is no rate: write 50/s, 10/min or 1/h")
    return RATES[unit] / float(number)


def parse_place(text: str) -> str | datetime:
    """Where a group starts: `earliest`, `latest`, a stream id, or a time."""
    if text in (EARLIEST, LATEST) or STREAM_ID.fullmatch(text):
        return text
    try:
        return parse_moment(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(
            f"use earliest, latest, a stream id such as 1700000000000-0, or a time: {error}"
        ) from None


def parse_headers(pairs: list[str]) -> dict[str, str]:
    """`name=value`, each."""
    headers = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{pair!r} is no header: write name=value", param_hint="--header")
        headers[name] = value
    return headers


def parse_payload(text: str, *, is_text: bool) -> Any:
    """What JSON says as that, anything else as the text it is."""
    if is_text:
        return text
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return text


def refuse_constant(name: str) -> None:
    """NaN and Infinity are words, not JSON."""
    raise ValueError(name)
