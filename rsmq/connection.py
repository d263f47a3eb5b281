"""The connection of a broker: what it has from `async with broker:` to its end, and how that is made and unmade."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from rsmq.connect import Client, Connector, retrying
from rsmq.embedded import server_for
from rsmq.keys import Keys
from rsmq.persistence import PostOffice
from rsmq.preflight import require
from rsmq.producer import Producer
from rsmq.settings import Settings
from rsmq.topic import Topics
from rsmq.worker import new_member_id

MakeProducer = Callable[[Client, Keys, Settings, Topics], Producer]


@dataclass(frozen=True, slots=True)
class Connection:
    """All of it lives on one client, and ends with it."""

    connector: Connector
    client: Client
    topics: Topics
    producer: Producer
    office: PostOffice


@asynccontextmanager
async def connection(
    settings: Settings,
    keys: Keys,
    *,
    declared: Callable[[str], int | None],
    make_producer: MakeProducer,
    publishes_only: bool,
) -> AsyncIterator[Connection]:
    """Connect to the server that the settings name; without a URL it is the embedded one, started if need be.

    Nesting is the order of the end: what publishes and posts is ended first, then the client, then the server. Raises
    BrokerUnavailable, and ConfigError for a server that would lose messages.
    """
    async with server_for(settings.url) as url:
        connector = Connector(url, settings)
        async with connector.connected() as client:
            async for attempt in retrying(settings):
                with attempt:
                    await require(client, settings, keys, publishes_only=publishes_only)
            topics = Topics(client, keys, settings, declared)
            producer = make_producer(client, keys, settings, topics)
            office = PostOffice(client, keys, settings, new_member_id())
            async with anyio.create_task_group() as tasks:
                await tasks.start(producer.run)
                await tasks.start(office.run)
                tasks.start_soon(connector.watch)
                yield Connection(connector, client, topics, producer, office)
                tasks.cancel_scope.cancel()
