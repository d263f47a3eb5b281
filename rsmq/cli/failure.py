"""How a command fails: the line on stderr, and the exit code."""

from __future__ import annotations

import typer

from rsmq.errors import ConfigError


def print_error(text: str) -> None:
    """A line on stderr."""
    typer.echo(f"rsmq: {text}", err=True)


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside a group of groups."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def exit_code(error: BaseException) -> int:
    """The exit code for an error: 2 for wrong use or configuration."""
    return 2 if any(isinstance(each, ConfigError) for each in leaves(error)) else 1
