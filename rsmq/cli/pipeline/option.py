"""Options that several of these commands share, each spelled once, and what they are as values."""

from __future__ import annotations

from datetime import date, datetime
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from rsmq.cli.value import parse_moment


def parse_size(text: str) -> int:
    """`256MiB` as bytes."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise typer.BadParameter(f"{text!r} is no size: write 64MiB or 1GiB") from None


def parse_day(text: str) -> date:
    """`2026-01-31`."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no day: write 2026-01-31") from None


Master = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Where Spark runs. Default: all cores here, or what spark-submit says."),
]
PasswordEnv = Annotated[
    str | None, typer.Option(metavar="NAME", help="Environment variable with the server's password, on executors too.")
]
PasswordFile = Annotated[str | None, typer.Option(metavar="PATH", help="File with it, on executors too.")]
Since = Annotated[
    datetime | None, typer.Option(parser=parse_moment, metavar="TIME", help="From then on, as 2026-01-31Z.")
]
Until = Annotated[datetime | None, typer.Option(parser=parse_moment, metavar="TIME", help="Until before then.")]
Where = Annotated[str | None, typer.Option(metavar="SQL", help="Only those, as \"get_json_object(value, '$.n') > 5\".")]
Job = Annotated[
    str | None, typer.Option(metavar="NAME", help="Its name. Default: made of what it does, so that it is done once.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count, and show what would be done.")]
