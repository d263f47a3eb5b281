"""Fixtures of the gateway's tests: one running gateway for a module, and a broker beside it."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from rsmq import Broker
from rsmq.gateway.fleet.registry import Registry
from rsmq.gateway.fleet.sessions import Sessions
from rsmq.gateway.fleet.shares import Shares
from rsmq.gateway.fleet.wills import Wills
from rsmq.model.clock import ServerClock
from rsmq.model.settings import Settings
from rsmq.persistence.inbox_writer import InboxWriter
from rsmq.redis.client.script_batcher import ScriptBatcher
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.servers import Server

NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def fleet_prefix() -> str:
    """The key prefix of all gateways of a module."""
    return f"g{uuid.uuid4().hex[:10]}"


@pytest.fixture(scope="module")
def gateway(server: Server, fleet_prefix: str) -> Iterator[GatewayProcess]:
    """A gateway that the tests of a module share, with every limit low enough to be reached."""
    with GatewayProcess(
        server.url, fleet_prefix, routes={"ingest/#": "ingest"},
        deny=[["write", "denied/write"], ["read", "denied/read"]],
        connect_timeout=2, sys_interval=0.5, keep_alive=600, session_expiry=3600, most_subscriptions=50,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
async def broker(server_url: str, fleet_prefix: str) -> AsyncIterator[Broker]:
    """A broker on the same keys."""
    async with Broker(Settings(url=server_url, prefix=fleet_prefix)) as connected:
        yield connected


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[Callable[..., RawClient]]:
    """Makes clients, and closes them."""
    made = list[RawClient]()

    def make(level: int = 4, port: int = 0) -> RawClient:
        made.append(RawClient(port or gateway.port, level))
        return made[-1]

    yield make
    for each in made:
        if hasattr(each, "_writer"):
            each.abort()


@asynccontextmanager
async def make_sessions(broker: Broker, gateway: str) -> AsyncIterator[Sessions]:
    """The sessions of a gateway, without the gateway."""
    client, keys = broker.client, broker.keys
    async with asyncio.TaskGroup() as tasks:
        batcher = ScriptBatcher(client)
        running = tasks.create_task(batcher.run())
        registry = Registry(client, keys, batcher)
        shares = Shares(client, keys, registry, InboxWriter(batcher, keys, broker.settings, is_cluster=False))

        async def publish(*_: object) -> None:
            """No will is expected."""
            raise AssertionError

        wills = Wills(client, keys, batcher, publish)
        yield Sessions(client, keys, batcher, registry, shares, wills, gateway, ServerClock(), tasks.create_task)
        running.cancel()


@pytest.fixture
def name() -> str:
    """A client id or a level of a topic name that no other test has."""
    return f"n{next(NUMBERS)}n"


@pytest.fixture
async def clients() -> AsyncIterator[list[RawClient]]:
    """All clients of a test are closed at its end."""
    RawClient.made = made = []
    yield made
    RawClient.made = None
    for each in made:
        each.abort()
