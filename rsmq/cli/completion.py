"""Completion in the shell: topics and groups as the server knows them. It never fails, and never waits long."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio
import typer

from rsmq.cli.connection import CommandConnection, connected, settings_for
from rsmq.redis.embedded.server import EmbeddedServer

PATIENCE = 1.5
"""Seconds that the shell waits after the tab key."""


def complete_topic(context: typer.Context, incomplete: str) -> list[str]:
    """The topics that begin so."""
    return names(context, incomplete, lambda connection: connection.topics.names())


def complete_group(context: typer.Context, incomplete: str) -> list[str]:
    """The groups of the topic before it that begin so."""
    topic = context.params.get("topic")

    async def groups(connection: CommandConnection) -> list[str]:
        return [state.name for state in await connection.inspector.groups(topic)] if topic else []

    return names(context, incomplete, groups)


def names(
    context: typer.Context, incomplete: str, question: Callable[[CommandConnection], Awaitable[list[str]]]
) -> list[str]:
    """Ask the server. Whatever goes wrong is no name: an error here would be written between the words of a line."""
    logging.disable(logging.CRITICAL)

    async def run() -> list[str]:
        with anyio.move_on_after(PATIENCE):
            async with connected(url) as connection:
                return await question(connection)
        return []

    try:
        url = context.params.get("url")
        if settings_for(url).url is None and EmbeddedServer().running_url() is None:
            return []  # a key press starts no server
        return sorted({name for name in anyio.run(run) if name.startswith(incomplete)})
    except Exception:
        return []
