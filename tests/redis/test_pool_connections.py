"""What is written when the other side is gone, or does not read."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Connection
from redis.exceptions import DataError

from rsmq.errors import BrokerUnavailable
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Connector
from rsmq.redis.client.pool_connections import SafeConnection, safe
from rsmq.redis.client.raw_connection import RawConnection, pack
from rsmq.testing.proxy import Proxy
from tests.patience import until
from tests.servers import Server

PING = pack(("PING",))
MEGABYTE, MOST = 1 << 20, 64


def transport_of(connection: RawConnection) -> asyncio.Transport:
    """Where it writes to."""
    return connection._connection._writer.transport  # type: ignore[attr-defined, no-any-return]


async def test_connection_reset_while_idle_is_opened_again() -> None:
    """A raw connection that was reset while idle raises BrokerUnavailable, and is opened again."""
    with Server(tcp=True) as server:
        async with Proxy(server.port) as line, Connector(line.url, Settings()).connected() as client:
            connection = RawConnection(client)
            await connection.open()
            line.reset()
            await until(transport_of(connection).is_closing, "the reset has come")
            with pytest.raises(BrokerUnavailable):
                await connection.exchange([PING])
            await connection.open()
            assert await connection.exchange([PING]) == [b"PONG"]
            await connection.close()


async def test_pool_gives_out_no_connection_that_was_reset_while_idle() -> None:
    """As a firewall resets one after some minutes: the next command is sent on a new one, and raises nothing."""
    with Server(tcp=True) as server:
        async with Proxy(server.port) as line, Connector(line.url, Settings()).connected() as client:
            await client.execute_command("PING")
            (idle,) = client.connection_pool._available_connections
            assert idle._writer is not None
            line.reset()
            await until(idle._writer.transport.is_closing, "the reset has come")
            assert await client.execute_command("PING") == b"PONG"
            assert await client.pipelined([("PING",)]) == [b"PONG"]


async def test_in_the_turn_of_the_break(connection: RawConnection) -> None:
    """The socket is about to be closed: nothing stays behind that disturbs the next one, which gets its number."""
    for _ in range(3):
        transport_of(connection).abort()
        with pytest.raises(BrokerUnavailable):
            await connection.exchange([PING])
        await connection.open()
        assert await connection.exchange([PING]) == [b"PONG"]


async def test_a_server_that_does_not_read() -> None:
    """It is waited for, and then given up: what it does not take is not piled up in our memory."""
    with Server() as server:
        settings = Settings(command_timeout=timedelta(seconds=2))
        async with Connector(server.url, settings).connected() as client:
            connection, sent = RawConnection(client), list[int]()
            await connection.open()

            async def send_all() -> None:
                for number in range(MOST):
                    await connection.send([pack(("SET", "k", b"x" * MEGABYTE))])
                    sent.append(number)

            server.pause()
            try:
                with pytest.raises(BrokerUnavailable):
                    await send_all()
            finally:
                server.resume()
            assert len(sent) < MOST


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "rediss://h",
        "unix:///s",
        "redis+sentinel://h/main",
        "rediss+sentinel://h/main",
        "redis+cluster://h",
    ],
)
async def test_every_connection_of_a_loop(url: str) -> None:
    """However the server is reached; of Sentinel's and a cluster's nodes, too."""
    client = Connector(url, Settings()).client()
    pools = [client.connection_pool]
    if client.is_cluster:
        pools.append(client._node_at(("h", 1)).connection_pool)  # type: ignore[attr-defined]
    if "sentinel" in url:
        pools += [each.connection_pool for each in client.connection_pool.sentinel_manager.sentinels]
    assert all(isinstance(pool.make_connection(), SafeConnection) for pool in pools)


def test_commands_are_packed_as_redis_py_does() -> None:
    """By hiredis, and what redis-py refuses is refused with its error."""
    ours, plain = safe(Connection)(), Connection()  # neither connects
    commands: list[tuple[Any, ...]] = [
        ("CONFIG GET", "x"),
        ("SET", "é", b"\x00\r\n", 7, 0.1, 1e22),
        (b"GET", "k" * 9000),
    ]
    for command in commands:
        assert b"".join(ours.pack_command(*command)) == b"".join(plain.pack_command(*command))
    assert len(ours.pack_command(*commands[1])) == 1
    with pytest.raises(DataError, match="bool"):
        ours.pack_command("SET", "k", True)
