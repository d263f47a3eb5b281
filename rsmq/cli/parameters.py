"""Options and arguments that several commands share, and the parsers of values on the command line."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from math import isinf
from typing import Annotated, Any

import typer

from rsmq.cli.completion import complete_group, complete_topic
from rsmq.model.duration import FORMS
from rsmq.model.duration import parse_duration as read_duration
from rsmq.model.stream_id import STREAM_ID
from rsmq.redis.streams import EARLIEST, LATEST

RATE = re.compile(r"\d{1,9}(\.\d{1,6})?")
STARTS_LIKE_JSON = re.compile(r'\s*([{["]|-?[0-9.]+[eE][+-]?[0-9]+\s*$|-?(NaN|Infinity)\s*$)')
RATES = {"s": timedelta(seconds=1), "min": timedelta(minutes=1), "h": timedelta(hours=1)}

PAYLOAD = "JSON; plain words are text. What starts like JSON but cannot be read is refused, unless --text is given."
Url = Annotated[
    str | None, typer.Option("--url", help="The server. Default: RSMQ_URL, else this project's embedded server.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
TOPIC: dict[str, Any] = {"metavar": "TOPIC", "show_default": False, "autocompletion": complete_topic}
GROUP: dict[str, Any] = {"metavar": "GROUP", "show_default": False, "autocompletion": complete_group}
TopicName = Annotated[str, typer.Argument(help="The topic.", **TOPIC)]
GroupName = Annotated[str, typer.Argument(help="The group.", **GROUP)]
AnyTopic = Annotated[str | None, typer.Argument(help="Only of this topic.", **TOPIC)]
AnyGroup = Annotated[str | None, typer.Argument(help="Only of this group.", **GROUP)]


def noun(help_text: str) -> typer.Typer:
    """A group of commands: `rsmq NOUN VERB`."""
    return typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)


def parse_duration(text: str) -> timedelta:
    """`5s` or `PT5S` as a duration, never negative. A bare number is not accepted."""
    try:
        span = read_duration(text)
    except ValueError:
        span = timedelta(-1)
    if span < timedelta(0):
        raise typer.BadParameter(f"{text!r} is not a valid duration: write {FORMS}")
    return span


def duration_option(help_text: str) -> Any:
    """An option whose value is a duration."""
    return typer.Option(parser=parse_duration, metavar="DURATION", help=help_text)


def parse_time(text: str) -> datetime:
    """`2026-01-31T12:00:00+01:00` as a time. It must have a time zone."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a valid time: write 2026-01-31T12:00:00+01:00 (ISO 8601)") from None
    if moment.tzinfo is None:
        raise typer.BadParameter(f"{text!r} has no time zone: end it with Z or an offset such as +01:00")
    return moment


def time_option(help_text: str) -> Any:
    """An option whose value is a time."""
    return typer.Option(parser=parse_time, metavar="TIME", help=help_text)


def parse_rate(text: str) -> timedelta:
    """`50/s` as the time between two messages. A bare number is not accepted."""
    number, _, unit = text.partition("/")
    if unit not in RATES or not RATE.fullmatch(number) or float(number) == 0:
        raise typer.BadParameter(f"{text!r} is not a valid rate: write 50/s, 10/min or 1/h")
    return RATES[unit] / float(number)


def parse_start(text: str) -> str | datetime:
    """Where a group starts: `earliest`, `latest`, a stream id, or a time."""
    if text in (EARLIEST, LATEST) or STREAM_ID.fullmatch(text):
        return text
    try:
        return parse_time(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(
            f"use earliest, latest, a stream id such as 1700000000000-0, or a time: {error}"
        ) from None


def parse_headers(pairs: list[str]) -> dict[str, str]:
    """Headers of `name=value` pairs."""
    headers = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{pair!r} is not a valid header: write name=value", param_hint="--header")
        headers[name] = value
    return headers


def parse_payload(text: str, *, is_text: bool) -> Any:
    """JSON as its value, plain words as text. What starts like JSON but cannot be read is a mistake."""
    if is_text:
        return text
    try:
        return json.loads(text, parse_constant=refuse_constant, parse_float=finite)
    except (ValueError, RecursionError) as error:
        if not STARTS_LIKE_JSON.match(text):
            return text
        why = str(error) if isinstance(error, ValueError) else "it nests too deeply"
        raise typer.BadParameter(
            f"the payload looks like JSON but is not valid ({why}): correct it, or send it as text with --text"
        ) from None


def refuse_constant(name: str) -> None:
    """NaN and Infinity are not JSON."""
    raise ValueError(f"JSON has no {name}")


def finite(digits: str) -> float:
    """A number that is not too large."""
    number = float(digits)
    if isinf(number):
        raise ValueError(f"{digits[:40]} is too large a number")
    return number
