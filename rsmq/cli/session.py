"""One short conversation with the server, as every command but the worker has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import anyio

from rsmq.connect import Client, Connector
from rsmq.dlq import DeadLetters
from rsmq.embedded import server_for
from rsmq.errors import RsmqError
from rsmq.inspector import GroupState, Inspector
from rsmq.keys import Keys
from rsmq.settings import Settings
from rsmq.topic import Topic, Topics

PATIENCE = timedelta(seconds=3)
"""A person waits: a server that is away is reported sooner than a worker gives up."""

T = TypeVar("T")


class NotFound(RsmqError):
    """What was asked for does not exist: a negative answer, not a wrong question."""


@dataclass(frozen=True, slots=True)
class Session:
    """A connected client and what asks through it."""

    settings: Settings
    client: Client
    keys: Keys
    topics: Topics
    inspector: Inspector
    dead_letters: DeadLetters

    async def topic(self, name: str) -> Topic:
        """The topic. Raises NotFound."""
        topic = await self.topics.find(name)
        if topic is None:
            known = ", ".join(await self.topics.names())
            raise NotFound(f"there is no topic {name!r}: {f'there are {known}' if known else 'there is none at all'}")
        return topic

    async def group(self, topic: str, group: str) -> GroupState:
        """The group. Raises NotFound."""
        await self.topic(topic)
        known = await self.inspector.groups(topic)
        for state in known:
            if state.name == group:
                return state
        names = ", ".join(state.name for state in known)
        raise NotFound(f"topic {topic!r} has no group {group!r}: {f'it has {names}' if names else 'it has none'}")


def settings_for(url: str | None) -> Settings:
    """The settings of the environment, with the address of the command line and a person's patience."""
    settings = Settings() if url is None else Settings(url=url)
    return settings.model_copy(update={"unavailable_timeout": min(PATIENCE, settings.unavailable_timeout)})


@asynccontextmanager
async def connected(url: str | None) -> AsyncIterator[Session]:
    """A session for the length of the block."""
    settings = settings_for(url)
    async with server_for(settings.url) as address, Connector(address, settings).connected() as client:
        keys = Keys(settings.prefix)
        topics, inspector = Topics(client, keys, settings), Inspector(client, keys, settings)
        yield Session(settings, client, keys, topics, inspector, DeadLetters(client, keys))


def ask(url: str | None, question: Callable[[Session], Awaitable[T]]) -> T:
    """Connect, ask one thing, and return the answer."""

    async def conversation() -> T:
        async with connected(url) as session:
            return await question(session)

    return anyio.run(conversation)
