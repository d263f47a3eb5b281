"""Commands for many keys in one exchange, on a single server (over a cluster: `tests/cluster/`)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.exceptions import NoScriptError

from rsmq.errors import BrokerError, BrokerUnavailable
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.client.raw_connection import ShardedConnection, pack
from tests.servers import Server


@pytest.fixture
async def sharded(client: Client) -> AsyncIterator[ShardedConnection]:
    """On the shared server, closed afterwards."""
    opened = ShardedConnection(client)
    yield opened
    await opened.close()


async def test_replies_come_in_order(sharded: ShardedConnection, prefix: str) -> None:
    """Every command gets its own reply, an error in its place."""
    one, two = f"{prefix}:1", f"{prefix}:2"
    replies = await sharded.exchange([
        (one, pack(("SET", one, "a", "PX", 60_000))),
        (two, pack(("HGET", one, "field"))),
        (two, pack(("EVALSHA", "0" * 40, 1, two))),
        (one, pack(("GET", one))),
    ])  # fmt: skip
    assert (replies[0], replies[3]) == (b"OK", b"a")
    assert isinstance(replies[1], BrokerError)
    assert isinstance(replies[2], NoScriptError)


async def test_exchange_without_commands_opens_no_connection(sharded: ShardedConnection) -> None:
    """Without commands there is no connection and no reply."""
    assert await sharded.exchange([]) == []
    assert "nodes=0" in repr(sharded)


async def test_an_unreachable_server_answers_every_command(prefix: str, settings: Settings) -> None:
    """Each command gets BrokerUnavailable in its place, and the connection is made again when the server is back."""
    with Server(tcp=True) as server:
        client = Connector(server.url, settings).client()
        sharded = ShardedConnection(client)
        key = f"{prefix}:k"
        assert await sharded.exchange([(key, pack(("SET", key, 1)))]) == [b"OK"]
        server.kill()
        replies = await sharded.exchange([(key, pack(("GET", key))), (key, pack(("GET", key)))])
        assert [type(reply) for reply in replies] == [BrokerUnavailable] * 2
        server.start()
        assert await sharded.exchange([(key, pack(("GET", key)))]) == [None]
        await sharded.close()
        await client.aclose()
