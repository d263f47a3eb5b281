"""Options that say which dead letters are meant."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import typer

from rsmq.cli.value import parse_moment
from rsmq.dlq import Selection, read_fields

Reason = Annotated[
    list[str] | None,
    typer.Option("--reason", help="Only those that died of it, as `rsmq dlq list` prints it. May be repeated."),
]
Error = Annotated[str | None, typer.Option("--error", metavar="TEXT", help="Only those whose error contains it.")]
Since = Annotated[
    datetime | None,
    typer.Option("--since", parser=parse_moment, metavar="TIME", help="Only those that died then or later."),
]
Until = Annotated[
    datetime | None, typer.Option("--until", parser=parse_moment, metavar="TIME", help="Only those that died before.")
]
Key = Annotated[str | None, typer.Option("--key", help="Only those with this ordering key.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="FIELD=VALUE",
        help="Only with this in the JSON payload: a.b=5, state!=done. May be repeated.",
    ),
]


def selection_of(
    reasons: Sequence[str] | None,
    error: str | None,
    since: datetime | None,
    until: datetime | None,
    key: str | None,
    where: Sequence[str] | None,
) -> Selection:
    """What was given, as one object."""
    return Selection(tuple(reasons or ()), error, since, until, key, read_fields(where or ()))
