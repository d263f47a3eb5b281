"""`rsmq docs`: what a broker receives and sends, as AsyncAPI 3, and what a change of it would break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rsmq.broker.asyncapi import asyncapi, breaking
from rsmq.cli.load_broker import load_broker
from rsmq.cli.output import print_json, print_line
from rsmq.cli.parameters import Json, example
from rsmq.errors import ConfigError
from rsmq.model.words import count


@example("rsmq docs app:broker --check asyncapi.json")
def docs(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:BROKER", help="Such as app:broker, from the current directory.")
    ],
    check: Annotated[
        Path | None, typer.Option(metavar="OLD.json", help="Compare with this document; exit 1 if a change breaks.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="The title of the document. Default: the module.")] = None,
    version: Annotated[str, typer.Option(help="The version of your service, for the document.")] = "1.0.0",
    as_json: Json = False,
) -> None:
    """Print the AsyncAPI 3 document of a broker, from the annotations of its handlers. Asks no server.

    With --check it prints what would break instead: messages that the old code published and the new one refuses, and
    messages that readers of the old document do not expect.
    """
    document = asyncapi(load_broker(target), title=title or target.partition(":")[0], version=version)
    if check is None:
        print_json(document)
        return
    lines = breaking(read_document(check), document)
    if as_json:
        print_json({"breaking": lines})
    else:
        for line in lines:
            print_line(line)
        print_line(f"{count(len(lines), 'change')} would break" if lines else "nothing would break")
    if lines:
        raise typer.Exit(1)


def read_document(path: Path) -> dict[str, object]:
    """The old document."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is no AsyncAPI document")
    return document
