"""Sessions that end without their device: forgotten, cancelled, disconnected, or their broker closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

import anyio
import pytest

from rsmq import Broker, Letter, Session, SessionLost, SessionTaken
from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError
from tests.persistence.sessions import SOON, take, waits
from tests.servers import Server

QUICK = timedelta(milliseconds=200)


async def listeners(broker: Broker, device: str = "phone") -> int:
    """The number of connections subscribed to the channel of a device."""
    return int((await broker.client.execute_command("PUBSUB", "SHARDNUMSUB", broker.keys.wake(device)))[1])


async def is_left_alone(broker: Broker, device: str = "phone") -> None:
    """Wait until no connection is subscribed to the channel of the device."""
    with anyio.fail_after(SOON):
        while await listeners(broker, device):
            await anyio.sleep(0.001)


# -- forgotten by the server ------------------------------------------------------------------------------------------


async def test_session_forgotten_by_the_server_ends_with_session_lost(make_broker: Callable[..., Broker]) -> None:
    """The session hash was deleted, expired or lost. A new session can be opened."""
    async with make_broker(inbox_poll=timedelta(milliseconds=50)) as broker:
        await broker.send("phone", 1)
        async with broker.connect("phone") as session:
            (letter,) = await take(session, 1)
            waiting = asyncio.ensure_future(anext(session))
            await waits(broker)
            await broker.client.execute_command("DEL", broker.keys.session("phone"))
            with anyio.fail_after(SOON), pytest.raises(SessionLost, match="the server has lost the session"):
                await waiting
            with pytest.raises(SessionLost, match="let the device connect again"):
                await session.ack(letter)
        async with broker.connect("phone", auto_ack=True) as session:
            assert [each.payload for each in await take(session, 1)] == [1]


async def test_acks_of_a_forgotten_session_raise(broker: Broker) -> None:
    """`flush` raises the refusal of an ack; leaving the block does not raise it again."""
    await broker.send("phone", 1)
    async with broker.connect("phone") as session:
        (letter,) = await take(session, 1)
        await broker.client.execute_command("DEL", broker.keys.session("phone"))
        await session.ack(letter)
        with anyio.fail_after(SOON), pytest.raises(SessionLost):
            await session.flush()


@pytest.mark.parametrize("is_acked", [True, False])
async def test_session_whose_newest_letters_are_lost_by_the_server_ends(
    make_broker: Callable[..., Broker], is_acked: bool
) -> None:
    """A replica without the newest writes has taken over: the seq of a lost letter was given to another one.

    An ack of the lost letter does not remove that one, and a session that reads on does not pass it by.
    """
    async with make_broker(inbox_poll=timedelta(milliseconds=50)) as broker:
        async with broker.connect("phone") as session:
            state = await broker.client.execute_command("DUMP", broker.keys.session("phone"))
            await broker.send("phone", "lost")
            (letter,) = await take(session, 1)
            inbox = broker.keys.device("phone")[0]
            await broker.client.execute_command("DEL", inbox, broker.keys.letter("phone", letter.seq))
            await broker.client.execute_command("RESTORE", broker.keys.session("phone"), 60_000, state, "REPLACE")
            await broker.send("phone", "new")
            if is_acked:
                await session.ack(letter)
            with anyio.fail_after(SOON), pytest.raises(SessionLost):
                await (session.flush() if is_acked else anext(session))
        async with broker.connect("phone", auto_ack=True) as session:
            assert [(each.payload, each.seq) for each in await take(session, 1)] == [("new", letter.seq)]


async def test_flushall_under_a_session_ends_it_at_the_next_letter(
    own_server: Server, make_broker: Callable[..., Broker]
) -> None:
    """The letter rings although the server knows no session; the device connects again and gets it."""
    async with make_broker(url=own_server.url) as broker:
        await broker.send("phone", "gone")
        async with broker.connect("phone") as session:
            (letter,) = await take(session, 1)
            waiting = asyncio.ensure_future(anext(session))
            await waits(broker)
            await broker.client.execute_command("FLUSHALL")
            await broker.send("phone", "new")
            with anyio.fail_after(SOON), pytest.raises(SessionLost):
                await waiting
            with pytest.raises(SessionLost):
                await session.ack(letter)
        async with broker.connect("phone", auto_ack=True) as session:
            assert [(each.payload, each.seq) for each in await take(session, 1)] == [("new", 1)]
        device = await broker.devices.find("phone")
        assert device is not None
        assert device.backlog == 0


async def test_takeover_with_a_full_window_ends_the_old_session(
    broker: Broker, make_broker: Callable[..., Broker]
) -> None:
    """The old session cannot read, because its window is full, but still finds the takeover."""
    await broker.send_many(("phone", n) for n in range(3))
    async with make_broker() as other, broker.connect("phone", window=2) as old:
        await take(old, 2)
        waiting = asyncio.ensure_future(anext(old))
        async with other.connect("phone", window=3) as new:
            with anyio.fail_after(SOON), pytest.raises(SessionTaken):
                await waiting
            assert [letter.payload for letter in await take(new, 3)] == [0, 1, 2]


# -- cancelled --------------------------------------------------------------------------------------------------------


async def test_cancelled_session_sends_its_last_acks(broker: Broker) -> None:
    """Acks before the cancellation reach the server."""
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


async def test_session_cancelled_while_opening_leaves_no_subscription(
    own_server: Server, make_broker: Callable[..., Broker]
) -> None:
    """It is cancelled while the server does not reply; the next session works."""
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


async def test_session_that_cannot_open_leaves_no_subscription(broker: Broker) -> None:
    """A key of another type under its session key is an error of this device only."""
    await broker.client.execute_command("SET", broker.keys.session("phone"), "foreign")
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        async with broker.connect("phone"):
            raise AssertionError("it was opened")
    await is_left_alone(broker)
    async with broker.connect("tablet") as session:
        assert session.epoch


# -- the server is away -----------------------------------------------------------------------------------------------


async def test_session_continues_after_an_outage(own_server: Server, make_broker: Callable[..., Broker]) -> None:
    """Reading fails when the timeout ends, and can be repeated: order is kept."""
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


async def test_session_left_during_an_outage_raises(own_server: Server, make_broker: Callable[..., Broker]) -> None:
    """The error of the body wins over the failed close."""
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
async def test_session_raises_when_its_broker_closes(make_broker: Callable[..., Broker], is_waiting: bool) -> None:
    """At once, while it waits or has letters to acknowledge; its block can be left."""
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
    """Whether it has read everything and nothing wakes it for a while: its poll is an hour away."""
    for _ in range(20):
        rings = session._cursor.rings
        if not rings or rings != session._heard or session._wake.is_set():
            return False
        await anyio.sleep(0.001)
    return True


async def test_session_of_a_closed_broker_cannot_be_opened(make_broker: Callable[..., Broker]) -> None:
    """A session made before and entered afterwards shows `async with broker`."""
    async with make_broker() as broker:
        session = broker.connect("phone")
    with anyio.fail_after(SOON), pytest.raises(ConfigError, match="async with broker"):
        await session.__aenter__()


async def test_error_inside_a_session_wins_over_its_failed_close(make_broker: Callable[..., Broker]) -> None:
    """The error of the body is raised, although the session cannot be closed."""
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
