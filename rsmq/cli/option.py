"""Options and arguments that several commands share, each spelled once."""

from __future__ import annotations

from typing import Annotated

import typer

Url = Annotated[
    str | None, typer.Option("--url", help="The server. Default: RSMQ_URL, else this project's embedded server.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it without asking.")]
TopicName = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)]
GroupName = Annotated[str, typer.Argument(metavar="GROUP", help="The group.", show_default=False)]
AnyTopic = Annotated[str | None, typer.Argument(metavar="TOPIC", help="Only of this topic.", show_default=False)]
AnyGroup = Annotated[str | None, typer.Argument(metavar="GROUP", help="Only of this group.", show_default=False)]


def noun(help_text: str) -> typer.Typer:
    """A group of commands: `rsmq NOUN VERB`."""
    return typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)
