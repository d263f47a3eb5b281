"""The raw connection: replies in order and in their shape, errors in place, and an end that is noticed."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import anyio
import pytest
from redis.exceptions import NoScriptError

from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError, GroupMissing
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.client.raw_connection import RawConnection, pack
from rsmq.redis.scripts import TAKE_LEASE
from rsmq.testing.proxy import Proxy
from tests.patience import until
from tests.servers import Server

MEGABYTE = 1 << 20


def test_pack_writes_text_bytes_and_numbers() -> None:
    """Text, bytes and numbers in the wire format."""
    assert pack(("SET", b"\xff", 1, 1.5)) == b"*4\r\n$3\r\nSET\r\n$1\r\n\xff\r\n$1\r\n1\r\n$3\r\n1.5\r\n"


async def test_open_knows_its_id(connection: RawConnection, client: Client) -> None:
    """The id is the one under which the server lists the connection, so that it can be ended from outside."""
    assert connection.is_open
    assert await client.execute_command("CLIENT", "KILL", "ID", connection.client_id) == 1


async def test_exchange_keeps_the_order(connection: RawConnection, prefix: str) -> None:
    """A thousand commands in one write, a thousand replies in the same order, raw."""
    replies = await connection.exchange([pack(("ECHO", n)) for n in range(1000)])
    assert replies == [str(n).encode() for n in range(1000)]
    assert await connection.exchange([pack(("HSET", f"{prefix}:h", "a", "1")), pack(("HGETALL", f"{prefix}:h"))]) == [
        1,
        [b"a", b"1"],
    ]


async def test_replies_are_not_kept_until_the_next_ones(connection: RawConnection) -> None:
    """A read of a thousand messages would stay in memory for as long as the next read blocks."""
    reply = (await connection.exchange([pack(("TIME",))]))[0]
    assert sys.getrefcount(reply) <= 2


async def test_late_command_is_not_executed_after_the_next_connection_is_open() -> None:
    """A command that timed out on its way must not be executed after its repetition on a new connection."""
    with Server(tcp=True) as server:
        async with Proxy(server.port) as proxy:
            settings = Settings(url=proxy.url, command_timeout=timedelta(seconds=2))
            async with Connector(proxy.url, settings).client() as client:
                connection = RawConnection(client)
                await connection.open()
                proxy.hold(lambda data: b"INCR" in data)
                with pytest.raises(BrokerUnavailable):
                    await connection.exchange([pack(("INCR", "n"))])
                first = connection._last.partition(" ")[0]
                await connection.open()
                assert await connection.exchange([pack(("INCR", "n"))]) == [1]
                proxy.release()
                clients = await client.execute_command("CLIENT", "LIST", "ID", first)
                assert not clients.strip()
                assert await client.execute_command("GET", "n") == b"1"
                await connection.close()


async def test_error_is_in_its_place(connection: RawConnection, prefix: str) -> None:
    """One command's error is one reply; its neighbours are unharmed, and so is the connection."""
    good, missing, wrong, last = await connection.exchange(
        [
            pack(("SET", f"{prefix}:s", "v")),
            pack(("XREADGROUP", "GROUP", "g", "c", "STREAMS", f"{prefix}:none", ">")),
            pack(("HGETALL", f"{prefix}:s")),
            pack(("GET", f"{prefix}:s")),
        ]
    )
    assert (good, last) == (b"OK", b"v")
    assert isinstance(missing, GroupMissing)
    assert isinstance(wrong, BrokerError)
    assert connection.is_open


async def test_a_forgotten_script_is_sent_with_its_source(
    connection: RawConnection, client: Client, prefix: str
) -> None:
    """Only the script calls are repeated, each reply is in its place, and what has to come last comes last again."""
    keys, args = [f"{prefix}:lease", f"{prefix}:stream"], ["m", 1000, "r", "", "", "g"]
    await client.execute_command("SCRIPT", "FLUSH")
    count = pack(("INCR", f"{prefix}:count"))
    call = pack(TAKE_LEASE.command(keys, args))
    first, once, second, last = await connection.exchange([call, count, call], last=count)
    assert (first[0], once, second[0], last) == (b"OK", 1, b"OK", 3)
    await client.execute_command("DEL", f"{prefix}:count", *keys)


async def test_a_hash_of_no_script_is_an_error_in_its_place(connection: RawConnection) -> None:
    """There is no source to send."""
    (reply,) = await connection.exchange([pack(("EVALSHA", "0" * 40, 0))])
    assert isinstance(reply, NoScriptError)


def test_a_pipeline_of_a_thread_sends_forgotten_scripts(connector: Connector, prefix: str) -> None:
    """As on a raw connection: each reply is in its place."""
    client, keys = connector.blocking_client(), [f"{prefix}:lease", f"{prefix}:stream"]
    client.execute_command("SCRIPT", "FLUSH")
    replies = client.pipelined([("ECHO", "a"), TAKE_LEASE.command(keys, ["m", 1000, "r", "", "", "g"])])
    assert [replies[0], replies[1][0]] == [b"a", b"OK"]
    client.execute_command("DEL", *keys)
    client.close()


async def test_send_and_receive_apart(connection: RawConnection) -> None:
    """Writing ahead and reading later keeps the order."""
    await connection.send([pack(("ECHO", "a")), pack(("ECHO", "b"))])
    assert await connection.receive(1) == [b"a"]
    assert await connection.receive(1) == [b"b"]


async def test_late_reply_ends_the_connection(connection: RawConnection, prefix: str) -> None:
    """A reply that did not come in time must not be read as the next one's: the connection is closed."""
    await connection.send([pack(("BLPOP", f"{prefix}:never", 1))])
    with pytest.raises(BrokerUnavailable):
        await connection.receive(1, timeout=0.05)
    assert not connection.is_open


async def test_cancelled_exchange_ends_the_connection(connection: RawConnection, prefix: str) -> None:
    """Replies that were not read must not be taken for those of the next commands."""
    with anyio.move_on_after(0.05) as scope:
        await connection.exchange([pack(("BLPOP", f"{prefix}:never", 1))])
    assert scope.cancelled_caught
    assert not connection.is_open


async def test_closed_connection_is_opened_with_a_new_id(connection: RawConnection) -> None:
    """A closed connection can be opened again, under a new id."""
    before = connection.client_id
    await connection.close()
    assert not connection.is_open
    await connection.open()
    assert connection.client_id != before
    assert await connection.exchange([pack(("PING",))]) == [b"PONG"]


async def test_killed_from_outside(connection: RawConnection, client: Client) -> None:
    """A connection that the server ends, in the middle of a blocking read, is BrokerUnavailable."""
    await connection.send([pack(("BLPOP", "never", 30))])
    await client.execute_command("CLIENT", "KILL", "ID", connection.client_id)
    with pytest.raises(BrokerUnavailable):
        await connection.receive(1, timeout=30)
    assert not connection.is_open


async def test_server_dies_in_the_middle_of_a_read() -> None:
    """SIGKILL of the server while a reply is awaited is BrokerUnavailable, and a new server is reached again."""
    with Server() as server:
        async with Connector(server.url, Settings()).connected() as client:
            connection = RawConnection(client)
            await connection.open()
            await connection.send([pack(("BLPOP", "never", 30))])
            server.kill()
            with pytest.raises(BrokerUnavailable):
                await connection.receive(1, timeout=30)
            with pytest.raises(BrokerUnavailable):
                await connection.open()
            await anyio.to_thread.run_sync(server.start)
            await connection.open()
            assert await connection.exchange([pack(("PING",))]) == [b"PONG"]
            await connection.close()


async def test_what_a_server_does_not_take_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    """A command that a paused server has not taken in time is gone with its connection, and asyncio logs nothing."""
    with Server() as server:
        settings = Settings(url=server.url)
        async with Connector(server.url, settings).client() as client:
            connection = RawConnection(client)
            await connection.open()
            protocol = connection._opened
            server.pause()
            try:
                with pytest.raises(BrokerUnavailable):
                    await connection.exchange([pack(("SET", "k", b"x" * 32 * MEGABYTE))], timeout=0.05)
                await until(lambda: "ended" in repr(protocol), "the connection is gone")
            finally:
                server.resume()
            assert protocol.transport.get_write_buffer_size() == 0
            await connection.open()
            protocol = connection._opened  # asyncio logs an error that no task took when its future goes
            gc.collect()
            assert await connection.exchange([pack(("GET", "k"))]) == [None]
            await connection.close()
    assert not [record for record in caplog.records if record.name == "asyncio"]


@asynccontextmanager
async def connected_to_peer(last: bytes) -> AsyncIterator[RawConnection]:
    """A connection to a peer that answers GET with these bytes and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = b"id=7 addr=127.0.0.1:1 laddr=127.0.0.1:2"
        while request := await reader.read(4096):
            if b"INFO" in request.split(b"\r\n"):
                writer.write(b"$%d\r\n%s\r\n" % (len(info), info))
            elif b"GET" in request:
                writer.write(last)
                break
            else:
                writer.write(b"+OK\r\n" * request.count(b"*"))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        client = Connector(f"redis://127.0.0.1:{port}", Settings()).client()
        connection = RawConnection(client)
        await connection.open()
        yield connection
        await client.aclose()


async def test_an_error_that_cannot_be_parsed_is_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    """Such as a MOVED without an address: BrokerUnavailable, and no fatal error of asyncio in the log."""
    async with connected_to_peer(b"-MOVED 1\r\n") as connection:
        with pytest.raises(BrokerError):
            await connection.exchange([pack(("GET", "k"))])
        assert not connection.is_open
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_partial_reply_is_unavailable() -> None:
    """A peer that hangs up in the middle of a reply is BrokerUnavailable, not half a value."""
    async with connected_to_peer(b"$100\r\nhalf") as connection:
        assert connection.client_id == 7
        with pytest.raises(BrokerUnavailable):
            await connection.exchange([pack(("GET", "k"))])
        assert not connection.is_open


async def test_paused_server_is_not_waited_for_for_ever() -> None:
    """Each exchange is bounded by `command_timeout`, however much is in it."""
    with Server() as server:
        settings = Settings(command_timeout=timedelta(seconds=2))
        async with Connector(server.url, settings).connected() as client:
            connection = RawConnection(client)
            await connection.open()
            server.pause()
            try:
                with pytest.raises(BrokerUnavailable):
                    await connection.exchange([pack(("SET", "k", "x" * 100_000))] * 100)
            finally:
                server.resume()
            assert not connection.is_open


async def test_wrong_password_at_open() -> None:
    """The credentials are refused in our words."""
    with Server(password="right") as server:
        client = Connector(server.url.replace("right", "wrong"), Settings()).client()
        with pytest.raises(ConfigError, match="credentials"):
            await RawConnection(client).open()
        await client.aclose()


async def test_replies_that_no_task_reads_stay_with_the_server(connection: RawConnection) -> None:
    """What arrives unasked is not piled up in our memory; a task that reads gets all of it."""
    transport = connection._connection._writer.transport  # type: ignore[attr-defined]
    await connection.send([pack(("ECHO", b"x" * MEGABYTE))] * 8)
    await until(lambda: not transport.is_reading(), "the socket is not read any more")
    assert await connection.receive(8) == [b"x" * MEGABYTE] * 8
    assert transport.is_reading()
    assert await connection.exchange([pack(("PING",))]) == [b"PONG"]


async def test_an_error_behind_other_replies() -> None:
    """A server that is loading says so in the middle of a pipeline: BrokerUnavailable, and the connection is closed."""
    async with connected_to_peer(b"+OK\r\n-LOADING Redis is loading the dataset in memory\r\n+OK\r\n") as connection:
        with pytest.raises(BrokerUnavailable, match="loading"):
            await connection.exchange([pack(("GET", "k"))] * 3)
        assert not connection.is_open
