"""How sessions end when it is not the device that ends them: forgotten, cancelled, cut off, closed under its feet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta

import anyio
import pytest

from rsmq import Broker, Letter, Session, SessionTaken, Settings
from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError
from tests.servers import Server

SOON = 20.0
"""Far below the poll of these brokers, unless a test says otherwise."""
QUICK = timedelta(milliseconds=200)


@pytest.fixture
def make_broker(server_url: str, prefix: str) -> Callable[..., Broker]:
    """A broker whose sessions practically never look by themselves."""

    def make(**overrides: object) -> Broker:
        values = {"url": server_url, "prefix": prefix, "preflight": "warn", "inbox_poll": timedelta(hours=1)}
        return Broker(Settings(**{**values, **overrides}))

    return make


@pytest.fixture
async def broker(make_broker: Callable[..., Broker], no_task_left: None) -> AsyncIterator[Broker]:
    """A connected broker."""
    async with make_broker() as connected:
        yield connected


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that this test may pause and kill."""
    with Server() as server:
        yield server


async def take(session: Session, count: int) -> list[Letter]:
    """The next letters."""
    with anyio.fail_after(SOON):
        return [await anext(session) for _ in range(count)]


async def waits(broker: Broker, device: str = "phone") -> None:
    """Until the session has found its inbox empty."""
    with anyio.fail_after(SOON):
        while await broker.client.execute_command("HGET", broker.keys.session(device), "idle") != b"1":
            await anyio.sleep(0.001)


async def listeners(broker: Broker, device: str = "phone") -> int:
    """Connections that are rung for a device."""
    return int((await broker.client.execute_command("PUBSUB", "SHARDNUMSUB", broker.keys.wake(device)))[1])


async def is_left_alone(broker: Broker, device: str = "phone") -> None:
    """Until nobody listens for the device any more."""
    with anyio.fail_after(SOON):
        while await listeners(broker, device):
            await anyio.sleep(0.001)


# -- forgotten by the server ------------------------------------------------------------------------------------------


async def test_the_server_has_forgotten_the_session(make_broker: Callable[..., Broker]) -> None:
    """A session hash that is gone (deleted, expired, lost) ends the session, which says so; a new one can be opened."""
    async with make_broker(inbox_poll=timedelta(milliseconds=50)) as broker:
        await broker.send("phone", 1)
        async with broker.connect("phone") as session:
            (letter,) = await take(session, 1)
            waiting = asyncio.ensure_future(anext(session))
            await waits(broker)
            await broker.client.execute_command("DEL", broker.keys.session("phone"))
            with anyio.fail_after(SOON), pytest.raises(SessionTaken, match="the server has forgotten its session"):
                await waiting
            with pytest.raises(SessionTaken, match="let the device connect again"):
                await session.ack(letter)
        async with broker.connect("phone", auto_ack=True) as session:
            assert [each.payload for each in await take(session, 1)] == [1]


async def test_a_forgotten_session_loses_its_acks_loudly(broker: Broker) -> None:
    """An ack that the server refuses is an error of `flush`, and only one: leaving does not repeat it."""
    await broker.send("phone", 1)
    async with broker.connect("phone") as session:
        (letter,) = await take(session, 1)
        await broker.client.execute_command("DEL", broker.keys.session("phone"))
        await session.ack(letter)
        with anyio.fail_after(SOON), pytest.raises(SessionTaken):
            await session.flush()


async def test_a_takeover_with_a_full_window(broker: Broker, make_broker: Callable[..., Broker]) -> None:
    """A session that may read nothing for now learns all the same that it is over."""
    await broker.send_many(("phone", n) for n in range(3))
    async with make_broker() as other, broker.connect("phone", window=2) as old:
        await take(old, 2)
        waiting = asyncio.ensure_future(anext(old))
        async with other.connect("phone", window=3) as new:
            with anyio.fail_after(SOON), pytest.raises(SessionTaken):
                await waiting
            assert [letter.payload for letter in await take(new, 3)] == [0, 1, 2]


# -- cancelled --------------------------------------------------------------------------------------------------------


async def test_a_cancelled_session_still_acknowledges(broker: Broker) -> None:
    """Its block is left in order: what was acknowledged before the cancellation reaches the server."""
    await broker.send_many(("phone", n) for n in range(3))
    with anyio.CancelScope() as scope:
        async with broker.connect("phone") as session:
            one, other, _ = await take(session, 3)
            await session.ack(one)
            await session.receive(other)
            scope.cancel()
            await anext(session)
    assert scope.cancelled_caught
    device = await broker.devices.find("phone")
    assert device is not None
    assert (device.backlog, device.received, device.gateway) == (2, 1, None)
    await is_left_alone(broker)


async def test_opening_is_cancelled(own_server: Server, make_broker: Callable[..., Broker]) -> None:
    """Giving up while the server does not answer leaves nobody listening; the next connection works."""
    async with make_broker(url=own_server.url) as broker:
        await broker.send("phone", 1)
        own_server.pause()
        try:
            opening = asyncio.ensure_future(broker.connect("phone").__aenter__())
            await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
        finally:
            own_server.resume()
        await is_left_alone(broker)
        async with broker.connect("phone", auto_ack=True) as session:
            assert len(await take(session, 1)) == 1


async def test_opening_fails(broker: Broker) -> None:
    """A key of another type under a session's name: an error of this device only, and nothing is left behind."""
    await broker.client.execute_command("SET", broker.keys.session("phone"), "foreign")
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        async with broker.connect("phone"):
            raise AssertionError("it was opened")
    await is_left_alone(broker)
    async with broker.connect("tablet") as session:
        assert session.epoch


# -- the server is away -----------------------------------------------------------------------------------------------


async def test_reading_goes_on_after_an_outage(own_server: Server, make_broker: Callable[..., Broker]) -> None:
    """When patience ends reading fails, and can be tried again: the session is not over, and the order is kept."""
    async with make_broker(url=own_server.url, command_timeout=QUICK, unavailable_timeout=QUICK) as broker:
        await broker.send_many(("phone", n) for n in range(4))
        async with broker.connect("phone", window=2) as session:
            one, other = await take(session, 2)
            await session.ack(one)
            await session.ack(other)
            await session.flush()
            own_server.pause()
            try:
                with anyio.fail_after(SOON), pytest.raises(BrokerUnavailable):
                    await anext(session)
            finally:
                own_server.resume()
            rest, tries = list[Letter](), 0
            while len(rest) < 2:
                try:
                    rest += await take(session, 1)
                except BrokerUnavailable:
                    tries += 1
                    assert tries < 100
            assert [letter.payload for letter in rest] == [2, 3]


async def test_leaving_while_the_server_is_away(own_server: Server, make_broker: Callable[..., Broker]) -> None:
    """The block ends all the same, with the error of its body, not with one of its own."""
    async with make_broker(url=own_server.url, command_timeout=QUICK) as broker:
        await broker.send("phone", 1)

        async def fail() -> None:
            async with broker.connect("phone") as session:
                (letter,) = await take(session, 1)
                own_server.kill()
                await session.ack(letter)
                raise ZeroDivisionError

        with anyio.fail_after(SOON), pytest.raises(ZeroDivisionError):
            await fail()


# -- the broker is closed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_the_broker_is_closed_under_a_session(make_broker: Callable[..., Broker], is_waiting: bool) -> None:
    """Whether it waits or has letters to acknowledge: told at once, and its block can be left."""
    broker, sessions = make_broker(), list[Session]()

    async def read() -> None:
        async with broker.connect("phone") as session:
            (letter,) = await take(session, 1)
            sessions.append(session)
            if is_waiting:
                await anext(session)
            while True:
                await session.ack(letter)
                await session.flush()

    async with broker:
        await broker.send("phone", 1)
        reading = asyncio.ensure_future(read())
        with anyio.fail_after(SOON):
            while not sessions or (is_waiting and not await is_asleep(sessions[0])):
                await anyio.sleep(0.001)
    with anyio.fail_after(SOON), pytest.raises(BrokerUnavailable, match="the broker was closed"):
        await reading


async def is_asleep(session: Session) -> bool:
    """Whether it has read everything, and for a while nothing wakes it: its poll is an hour away."""
    for _ in range(20):
        if not session._rings or session._rings != session._heard or session._wake.is_set():
            return False
        await anyio.sleep(0.001)
    return True


async def test_a_session_of_a_closed_broker_is_not_opened(make_broker: Callable[..., Broker]) -> None:
    """One that was made before and is entered afterwards says what to do."""
    async with make_broker() as broker:
        session = broker.connect("phone")
    with anyio.fail_after(SOON), pytest.raises(ConfigError, match="async with broker"):
        await session.__aenter__()


async def test_an_error_in_the_block_of_a_closed_broker(make_broker: Callable[..., Broker]) -> None:
    """What went wrong first is what is raised, though the session could not be closed any more."""
    broker, is_open, may_end = make_broker(), asyncio.Event(), asyncio.Event()

    async def fail() -> None:
        async with broker.connect("phone"):
            is_open.set()
            await may_end.wait()
            raise ZeroDivisionError

    async with broker:
        failing = asyncio.ensure_future(fail())
        await is_open.wait()
    may_end.set()
    with anyio.fail_after(SOON), pytest.raises(ZeroDivisionError):
        await failing
