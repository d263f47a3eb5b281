"""The raw connection: replies in order and in their shape, errors in place, and an end that is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import anyio
import pytest
from redis.exceptions import NoScriptError

from rsmq.connect import Client, Connector
from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError, GroupMissing
from rsmq.script import TAKE_LEASE
from rsmq.settings import Settings
from rsmq.wire import Wire, pack
from tests.servers import Server


@pytest.fixture
async def wire(client: Client) -> AsyncIterator[Wire]:
    """An open wire to the shared server."""
    opened = Wire(client)
    await opened.open()
    yield opened
    await opened.close()


def test_pack() -> None:
    """Text, bytes and numbers in wire form."""
    assert pack(("SET", b"\xff", 1, 1.5)) == b"*4\r\n$3\r\nSET\r\n$1\r\n\xff\r\n$1\r\n1\r\n$3\r\n1.5\r\n"


async def test_open_knows_its_id(wire: Wire, client: Client) -> None:
    """The id is the one under which the server lists the connection, so that it can be ended from outside."""
    assert wire.is_open
    assert await client.execute_command("CLIENT", "KILL", "ID", wire.client_id) == 1


async def test_exchange_keeps_the_order(wire: Wire, prefix: str) -> None:
    """A thousand commands in one write, a thousand replies in the same order, raw."""
    replies = await wire.exchange([pack(("ECHO", n)) for n in range(1000)])
    assert replies == [str(n).encode() for n in range(1000)]
    assert await wire.exchange([pack(("HSET", f"{prefix}:h", "a", "1")), pack(("HGETALL", f"{prefix}:h"))]) == [
        1,
        [b"a", b"1"],
    ]


async def test_error_is_in_its_place(wire: Wire, prefix: str) -> None:
    """One command's error is one reply; its neighbours are unharmed, and so is the connection."""
    good, missing, wrong, last = await wire.exchange(
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
    assert wire.is_open


async def test_noscript_is_in_its_place(wire: Wire, keys: object, prefix: str) -> None:
    """The caller of a script tells a forgotten script from a failed one, and sends the source."""
    command = ("EVALSHA", "0" * 40, 0)
    (reply,) = await wire.exchange([pack(command)])
    assert isinstance(reply, NoScriptError)
    full = TAKE_LEASE.full_command([f"{prefix}:lease", f"{prefix}:stream"], ["m", 1000, "r", "", "", "g"])
    assert (await wire.exchange([pack(full)]))[0][0] == b"OK"


async def test_send_and_receive_apart(wire: Wire) -> None:
    """Writing ahead and reading later keeps the order."""
    await wire.send([pack(("ECHO", "a")), pack(("ECHO", "b"))])
    assert await wire.receive(1) == [b"a"]
    assert await wire.receive(1) == [b"b"]


async def test_late_reply_ends_the_connection(wire: Wire, prefix: str) -> None:
    """A reply that did not come in time must not be read as the next one's: the wire is closed."""
    await wire.send([pack(("BLPOP", f"{prefix}:never", 1))])
    with pytest.raises(BrokerUnavailable):
        await wire.receive(1, timeout=0.05)
    assert not wire.is_open


async def test_cancelled_exchange_ends_the_connection(wire: Wire, prefix: str) -> None:
    """Replies that nobody has waited for must not be read as the next ones."""
    with anyio.move_on_after(0.05) as scope:
        await wire.exchange([pack(("BLPOP", f"{prefix}:never", 1))])
    assert scope.cancelled_caught
    assert not wire.is_open


async def test_open_again(wire: Wire) -> None:
    """A closed wire can be opened again, under a new id."""
    before = wire.client_id
    await wire.close()
    assert not wire.is_open
    await wire.open()
    assert wire.client_id != before
    assert await wire.exchange([pack(("PING",))]) == [b"PONG"]


async def test_killed_from_outside(wire: Wire, client: Client) -> None:
    """A connection that the server ends, in the middle of a blocking read, is BrokerUnavailable."""
    await wire.send([pack(("BLPOP", "never", 30))])
    await client.execute_command("CLIENT", "KILL", "ID", wire.client_id)
    with pytest.raises(BrokerUnavailable):
        await wire.receive(1, timeout=30)
    assert not wire.is_open


async def test_server_dies_in_the_middle_of_a_read() -> None:
    """SIGKILL of the server while a reply is awaited is BrokerUnavailable, and a new server is reached again."""
    with Server() as server:
        async with Connector(server.url, Settings()).connected() as client:
            wire = Wire(client)
            await wire.open()
            await wire.send([pack(("BLPOP", "never", 30))])
            server.kill()
            with pytest.raises(BrokerUnavailable):
                await wire.receive(1, timeout=30)
            with pytest.raises(BrokerUnavailable):
                await wire.open()
            await anyio.to_thread.run_sync(server.start)
            await wire.open()
            assert await wire.exchange([pack(("PING",))]) == [b"PONG"]
            await wire.close()


async def test_half_a_reply() -> None:
    """A peer that hangs up in the middle of a reply is BrokerUnavailable, not half a value."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = b"id=7 addr=127.0.0.1:1 laddr=127.0.0.1:2"
        while request := await reader.read(4096):
            if b"CLIENT" in request and b"INFO" in request.split(b"\r\n"):
                writer.write(b"$%d\r\n%s\r\n" % (len(info), info))
            elif b"GET" in request:
                writer.write(b"$100\r\nhalf")
                break
            else:
                writer.write(b"+OK\r\n" * request.count(b"*"))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        client = Connector(f"redis://127.0.0.1:{port}", Settings()).client()
        wire = Wire(client)
        await wire.open()
        assert wire.client_id == 7
        with pytest.raises(BrokerUnavailable):
            await wire.exchange([pack(("GET", "k"))])
        assert not wire.is_open
        await client.aclose()


async def test_paused_server_is_not_waited_for_for_ever() -> None:
    """Each exchange is bounded by `command_timeout`, however much is in it."""
    with Server() as server:
        settings = Settings(command_timeout=timedelta(milliseconds=200))
        async with Connector(server.url, settings).connected() as client:
            wire = Wire(client)
            await wire.open()
            server.pause()
            try:
                with pytest.raises(BrokerUnavailable):
                    await wire.exchange([pack(("SET", "k", "x" * 100_000))] * 100)
            finally:
                server.resume()
            assert not wire.is_open


async def test_wrong_password_at_open() -> None:
    """The credentials are refused in our words."""
    with Server(password="right") as server:
        client = Connector(server.url.replace("right", "wrong"), Settings()).client()
        with pytest.raises(ConfigError, match="credentials"):
            await Wire(client).open()
        await client.aclose()


async def test_what_has_arrived_is_taken_at_once(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first reply is asked for. If this fails, redis-py has renamed what `_take_arrived` uses."""
    asked = []
    ask = wire._connection.read_response

    async def count(**options: object) -> object:
        asked.append(options)
        return await ask(**options)

    monkeypatch.setattr(wire._connection, "read_response", count)
    replies = await wire.exchange([pack(("ECHO", n)) for n in range(50)])
    assert replies == [str(n).encode() for n in range(50)]
    assert len(asked) < 10


@pytest.mark.parametrize("missing", ["reader", "sentinel"])
async def test_without_the_private_names(wire: Wire, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """A redis-py that has them no more costs time, nothing else."""
    if missing == "sentinel":
        monkeypatch.setattr("rsmq.wire.NOT_ENOUGH_DATA", None)
    else:
        monkeypatch.setattr(wire, "_take_arrived", lambda replies, count: None)
    replies = await wire.exchange([pack(("ECHO", n)) for n in range(50)])
    assert replies == [str(n).encode() for n in range(50)]


async def test_an_error_behind_other_replies() -> None:
    """A server that is loading again says so in the middle of a pipeline: BrokerUnavailable, and the wire is closed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = b"id=7 addr=127.0.0.1:1 laddr=127.0.0.1:2"
        while request := await reader.read(4096):
            if b"INFO" in request.split(b"\r\n"):
                writer.write(b"$%d\r\n%s\r\n" % (len(info), info))
            elif b"GET" in request:
                writer.write(b"+OK\r\n-LOADING Redis is loading the dataset in memory\r\n+OK\r\n")
                break
            else:
                writer.write(b"+OK\r\n" * request.count(b"*"))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        client = Connector(f"redis://127.0.0.1:{port}", Settings()).client()
        wire = Wire(client)
        await wire.open()
        with pytest.raises(BrokerUnavailable, match="loading"):
            await wire.exchange([pack(("GET", "k"))] * 3)
        assert not wire.is_open
        await client.aclose()
