"""Options and arguments that several commands share, and the parsers of values on the command line."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import Field, fields
from datetime import datetime, timedelta
from functools import wraps
from inspect import Parameter
from math import isinf
from typing import Annotated, Any, Final, TypeVar, get_type_hints

import typer

from rsmq.cli.completion import complete_group, complete_topic
from rsmq.model.duration import FORMS, parse_duration
from rsmq.model.stream_id import is_position
from rsmq.model.words import duration
from rsmq.redis.streams import EARLIEST, LATEST

RATE = re.compile(r"\d{1,9}(\.\d{1,6})?")
STARTS_LIKE_JSON = re.compile(r'\s*([{["]|-?[0-9.]+[eE][+-]?[0-9]+\s*$|-?(NaN|Infinity)\s*$)')
RATES = {"s": timedelta(seconds=1), "min": timedelta(minutes=1), "h": timedelta(hours=1)}

Plain = Annotated[
    bool,
    typer.Option("--plain", help="Do not encrypt it, even with RSMQ_KEYS or where the other ones are encrypted."),
]
PAYLOAD = "JSON; plain words are text. What starts like JSON but cannot be read is refused, unless --text is given."
Url = Annotated[
    str | None, typer.Option("--url", help="The server. Default: RSMQ_URL, else this project's embedded server.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsText = Annotated[bool, typer.Option("--text", help="Take the payload as text, even if it is JSON.")]
Most = Annotated[int, typer.Option("-n", min=1, help="How many at most.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
TOPIC: dict[str, Any] = {"metavar": "TOPIC", "show_default": False, "autocompletion": complete_topic}
GROUP: dict[str, Any] = {"metavar": "GROUP", "show_default": False, "autocompletion": complete_group}
TopicName = Annotated[str, typer.Argument(help="The topic.", **TOPIC)]
GroupName = Annotated[str, typer.Argument(help="The group.", **GROUP)]
AnyTopic = Annotated[str | None, typer.Argument(help="Only of this topic.", **TOPIC)]
AnyGroup = Annotated[str | None, typer.Argument(help="Only of this group.", **GROUP)]


EXAMPLES: Final[dict[tuple[str, str], str]] = {}
"""By module and name of a command."""

Command = TypeVar("Command", bound=Callable[..., None])


def example(line: str) -> Callable[[Command], Command]:
    """Let the help of a command end with this example."""

    def with_example(command: Command) -> Command:
        EXAMPLES[command.__module__, command.__qualname__] = line
        return command

    return with_example


def noun(help_text: str) -> typer.Typer:
    """A group of commands: `rsmq NOUN VERB`."""
    return typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)


def duration_argument(text: str) -> timedelta:
    """`5s` or `PT5S` as a duration, never negative. A bare number is not accepted."""
    try:
        span = parse_duration(text)
    except ValueError:
        span = timedelta(-1)
    if span < timedelta(0):
        raise typer.BadParameter(f"{text!r} is not a valid duration: write {FORMS}")
    return span


def duration_option(help_text: str, *names: str) -> Any:
    """An option whose value is a duration."""
    return typer.Option(*names, parser=duration_argument, metavar="DURATION", help=help_text)


def options_of(options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of a dataclass of options, in place of its `**given`.

    Only what the user gives is in `given`, under the names of the fields. The metadata of a field have its `text`, and
    its `flag` where that is not its name. The dataclass checks the values.
    """

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(**values: Any) -> None:
            given = {each.name: values.pop(each.name) for each in fields(options)}
            values |= {name: value for name, value in given.items() if value not in (None, [])}
            command(**values)

        kinds, signature = get_type_hints(options), inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        more = [
            Parameter(each.name, Parameter.KEYWORD_ONLY, default=None, annotation=option_for(each, kinds[each.name]))
            for each in fields(options)
        ]
        called.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in (*own, *more)}
        return called

    return with_options


def option_for(each: Field[Any], kind: Any) -> Any:
    """The parameter of a command for a field of options. It is None unless the user gives it."""
    name = "--" + (each.metadata["flag"] or each.name).replace("_", "-")
    text, default = each.metadata["text"], each.default
    if default not in (None, False, ()):
        text += f" [default: {duration(default) if isinstance(default, timedelta) else default}]"
    if isinstance(default, timedelta):
        return Annotated[timedelta | None, duration_option(text, name)]
    if isinstance(default, tuple):
        return Annotated[list[str] | None, typer.Option(name, help=f"{text} Repeatable.")]
    return Annotated[kind | None, typer.Option(name, help=text)]


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
    if text in (EARLIEST, LATEST) or is_position(text):
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
