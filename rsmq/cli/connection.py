"""The connection of a command, and the questions that several commands ask."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import anyio

from rsmq.broker import Broker
from rsmq.codecs.reading import Reading, codecs_beside
from rsmq.dlq import DeadLetters
from rsmq.errors import RsmqError
from rsmq.inspector.inspector import Inspector
from rsmq.inspector.key_in_use import key_of_topic
from rsmq.inspector.state import GroupState
from rsmq.model.body import Offloading
from rsmq.model.encoding import Codec
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.model.words import suggestion
from rsmq.redis.client.connector import Client, Connector, redact
from rsmq.redis.embedded.server import EmbeddedServer, server_for
from rsmq.redis.topics import Topic, Topics
from rsmq.redis.wire.url import database_of

PATIENCE = timedelta(seconds=3)
"""A person is waiting: an unreachable server is reported sooner than a worker would."""

DEFAULT_PREFIX = Settings.prefix

T = TypeVar("T")


class NotFound(RsmqError):
    """The topic, group, dead letter or device does not exist: exit code 1."""


@dataclass(frozen=True, slots=True)
class CommandConnection:
    """A connected client, and what asks through it."""

    settings: Settings
    client: Client
    keys: Keys
    topics: Topics
    inspector: Inspector
    dead_letters: DeadLetters
    encoding: Reading
    """Undoes what is compressed, or encrypted with a key of RSMQ_KEYS."""

    async def topic(self, name: str) -> Topic:
        """The topic. Raises NotFound."""
        topic = await self.topics.find(name)
        if topic is None:
            some = suggestion(name, await self.topics.names(), "topics") or asked("there are no topics", self.settings)
            raise NotFound(f"there is no topic {name!r}: {some}")
        return topic

    async def group(self, topic: str, group: str) -> GroupState:
        """The group. Raises NotFound."""
        await self.topic(topic)
        known = await self.inspector.groups(topic)
        for state in known:
            if state.name == group:
                return state
        some = suggestion(group, [state.name for state in known], "groups") or "it has no groups"
        raise NotFound(f"topic {topic!r} has no group {group!r}: {some}")

    async def check_unserved(self, topic: str, group: str | None = None) -> None:
        """Raises RsmqError if the topic, or the group of it, has live members."""
        live = [each.id for each in await self.inspector.members(topic, group) if each.heard_ago is not None]
        if live:
            name = topic if group is None else f"{topic}/{group}"
            raise RsmqError(f"{name} has live members: stop {', '.join(live)} first (`rsmq member list`)")


OTHERWISE = ", or add --plain to store it readable"


async def codecs_for_topic(client: Client, keys: Keys, topic: Topic | None) -> list[Codec]:
    """What a command stores a message with: as the newest one of its topic; keys decide for a topic without any.
    Raises ConfigError for keys that are missing."""
    newest = await key_of_topic(client, keys, topic)
    return codecs_beside(newest, "the topic" if topic is None else f"topic {topic.name!r}", OTHERWISE)


@asynccontextmanager
async def writing_with(broker: Broker, codecs: Sequence[Codec]) -> AsyncIterator[Broker]:
    """A broker with these codecs; the broker itself without any."""
    if not codecs:
        yield broker
        return
    async with Broker(broker.settings, codecs=codecs) as other:
        yield other


def settings_for(url: str | None) -> Settings:
    """The settings of the environment, with the address of the command line and the timeout of a command."""
    settings = Settings() if url is None else Settings(url=url)
    return replace(settings, unavailable_timeout=min(PATIENCE, settings.unavailable_timeout))


def asked(text: str, settings: Settings | str | None) -> str:
    """An empty answer with the server that gave it: the reason is often that another one was meant."""
    found = settings if isinstance(settings, Settings) else settings_for(settings)
    if found.url is None:
        where = f"this project's embedded server, with its data in {EmbeddedServer().directory}"
    else:
        where = redact(found.url)
    return f"{text} at {where}{f', prefix {found.prefix}' if found.prefix != DEFAULT_PREFIX else ''}"


@asynccontextmanager
async def connected(url: str | None) -> AsyncIterator[CommandConnection]:
    """A connection for the length of the block."""
    settings = settings_for(url)
    async with server_for(settings) as address, Connector(address, settings).connected() as client:
        keys = Keys(settings.prefix, database_of(settings.url))
        topics, inspector = Topics(client, keys, settings), Inspector(client, keys, settings)
        encoding = Reading(int(settings.decoded_limit), may_block=True)
        letters = DeadLetters(client, keys, encoding)
        yield CommandConnection(settings, client, keys, topics, inspector, letters, encoding)


def ask(url: str | None, question: Callable[[CommandConnection], Awaitable[T]]) -> T:
    """Connect, ask one thing, and return the answer."""

    async def run() -> T:
        async with connected(url) as connection:
            return await question(connection)

    return anyio.run(run)


def ask_broker(
    url: str | None,
    act: Callable[[Broker], Awaitable[T]],
    *,
    offload: Offloading | None = None,
    codecs: Sequence[Codec] = (),
) -> T:
    """Connect a broker, do one thing, and return the answer. Warnings of the preflight are left to `rsmq doctor`."""
    logging.getLogger("rsmq").setLevel(logging.ERROR)

    async def run() -> T:
        async with Broker(settings_for(url), offload=offload, codecs=codecs) as broker:
            return await act(broker)

    return anyio.run(run)
