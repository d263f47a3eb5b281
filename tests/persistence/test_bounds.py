"""Inboxes at their limits: many open handshakes, wrapped packet ids, a broker or server that goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

import anyio
import pytest

from rsmq import Broker, SessionTaken, Settings
from rsmq.errors import BrokerUnavailable, ConfigError
from rsmq.model.keys import Keys
from rsmq.persistence.letter import PACKET_IDS, packet_id_of
from rsmq.redis.client.connector import Client
from tests.persistence.conftest import Inbox
from tests.servers import Server


async def durations(client: Client, act: Callable[[], Awaitable[object]]) -> list[float]:
    """Milliseconds of server time of each script call during `act`, in order, from its slow log."""
    await client.execute_command("CONFIG", "SET", "slowlog-log-slower-than", 0, "slowlog-max-len", 10_000)
    await client.execute_command("SLOWLOG", "RESET")
    try:
        await act()
        entries = await client.execute_command("SLOWLOG", "GET", -1)
    finally:
        await client.execute_command("CONFIG", "SET", "slowlog-log-slower-than", 10_000, "slowlog-max-len", 128)
    return [entry[2] / 1000 for entry in reversed(entries) if entry[3][0] == b"EVALSHA"]


@pytest.fixture
def patient(settings: Settings) -> Settings:
    """Settings on the shared server whose sessions practically never poll."""
    return replace(settings, preflight="warn", inbox_poll=timedelta(hours=1))


async def test_nearly_all_packet_ids_in_use_oldest_letters_make_room(client: Client, inbox: Inbox) -> None:
    """With the largest limit nearly every id is taken: none is given twice, and the oldest letters are dropped."""
    largest = inbox.limit = 65_000
    await inbox.add("first")
    for start in range(2, largest + 1, 5000):  # written directly: 65 000 letters in calls of 500 take long
        seqs = range(start, min(start + 5000, largest + 1))
        await client.execute_command("ZADD", inbox.inbox, *(part for seq in seqs for part in (seq, seq)))
    await inbox.start_at(PACKET_IDS)
    stored, dropped, expired, _ = await inbox.add(*["new"] * 500)
    assert (stored, dropped + expired) == (500, 500)
    refs = await inbox.refs()
    assert len({packet_id_of(seq) for seq in refs}) == len(refs) == largest
    assert refs[0] == 501


async def test_letters_a_round_old_cost_an_add_little(client: Client, keys: Keys, inbox: Inbox) -> None:
    """3 000 letters of one window stay unacknowledged for a round: adding stays fast, and no id is given twice."""
    usual = Inbox(client, keys, "usual")
    for to in (usual, inbox):
        for _ in range(5):
            await to.add(*["x"] * 500)
    await inbox.start_at(PACKET_IDS - 200)

    async def add(to: Inbox) -> None:
        assert (await to.add(*["y"] * 100)) == [100, 0, 0, 0]

    # in turn, the best counts: a busy second of the machine is in both
    took = {usual: list[float](), inbox: list[float]()}
    for _ in range(20):
        for to, times in took.items():
            times.extend(await durations(client, partial(add, to)))
    assert min(took[inbox]) < 10 * min(took[usual])
    refs = await inbox.refs()
    assert len({packet_id_of(seq) for seq in refs}) == len(refs) == 4500


async def hold(inbox: Inbox, count: int) -> str:
    """Store and receive `count` letters; returns the epoch."""
    epoch, _ = await inbox.open()
    for start in range(1, count + 1, 500):
        await inbox.add(*["x"] * 500)
        await inbox.receive(epoch, *range(start, start + 500))
    return epoch


async def test_3000_open_handshakes_cost_a_call_little(client: Client, keys: Keys, inbox: Inbox) -> None:
    """3 000 letters are received but not acknowledged, and no packet id is used twice. Beside an inbox without them."""
    usual = Inbox(client, keys, "usual")
    epochs = {usual: (await usual.open())[0], inbox: await hold(inbox, 3000)}
    for _ in range(6):
        await usual.add(*["x"] * 500)
    await inbox.start_at(PACKET_IDS - 200)

    async def add(to: Inbox) -> None:
        assert (await to.add(*["y"] * 100))[0] == 100

    async def page(of: Inbox) -> None:
        assert len(await of.letters(epochs[of], after=2800 if of is inbox else 0, count=200)) == 200

    # the same calls several times, the best counts: another process in between is not the server's work
    for call in (add, page):
        await call(usual)  # the first one only loads the script
        best = {
            each: min([max(await durations(client, partial(call, each))) for _ in range(5)]) for each in (usual, inbox)
        }
        assert best[inbox] < 10 * best[usual], f"{call.__name__}: {best}"
    refs = await inbox.refs()
    assert len({packet_id_of(seq) for seq in refs}) == len(refs) == 3500


async def test_handshakes_hold_at_most_half_of_the_packet_ids(inbox: Inbox) -> None:
    """Letters beyond that are not held, so new letters can still be stored."""
    inbox.limit = PACKET_IDS
    await hold(inbox, 33_000)
    held = (await inbox.state())["held"].split(",")
    assert len(held) == PACKET_IDS // 2
    await inbox.start_at(2 * PACKET_IDS)
    assert (await inbox.add(*["y"] * 500))[0] == 500
    refs = await inbox.refs()
    assert set(map(int, held)) <= set(refs)
    assert len({packet_id_of(seq) for seq in refs}) == len(refs)


async def test_session_of_a_closed_broker_raises_on_every_step(patient: Settings) -> None:
    """A session that waits, and one that is iterated afterwards, raise instead of waiting for ever."""
    async with Broker(patient) as broker:
        session = await broker.connect("phone").__aenter__()
        waiting = asyncio.ensure_future(anext(session))
        for _ in range(5):
            await broker.send("other", 1)
    try:
        with anyio.fail_after(15), pytest.raises(BrokerUnavailable):
            await waiting
        with anyio.fail_after(15), pytest.raises(BrokerUnavailable):
            await anext(session)
    finally:
        waiting.cancel()


async def test_session_left_while_the_server_is_silent_raises() -> None:
    """Leaving the block flushes the acks, so an unconfirmed ack is an error."""

    async def leave(broker: Broker, server: Server) -> None:
        async with broker.connect("phone") as session:
            letter = await anext(session)
            server.pause()
            await session.ack(letter)

    with Server() as server:
        settings = Settings(url=server.url, preflight="warn", command_timeout=timedelta(seconds=1))
        async with Broker(settings) as broker:
            await broker.send("phone", 1)
            try:
                with pytest.raises(BrokerUnavailable):
                    await leave(broker, server)
            finally:
                server.resume()


async def test_device_that_returns_at_once_interrupts_no_subscription(
    patient: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """A device is taken over by another gateway and comes back: other subscriptions stay connected."""
    caplog.set_level(logging.INFO, "rsmq.doorbell")
    async with Broker(patient) as broker, Broker(patient) as other:
        for _ in range(10):
            session = await broker.connect("phone").__aenter__()
            async with other.connect("phone"):
                with anyio.fail_after(20), pytest.raises(SessionTaken):
                    await anext(session)
                await session.__aexit__(None, None, None)
                async with broker.connect("phone", auto_ack=True) as back:
                    await other.send("phone", 1)
                    with anyio.fail_after(20):
                        await anext(back)
    assert "interrupted" not in caplog.text


async def test_session_opened_twice_never_waits_for_an_old_ack(patient: Settings) -> None:
    """It refuses to open again, or starts anew."""
    async with Broker(patient) as broker:
        await broker.send("phone", 1)
        session = broker.connect("phone", window=1)
        async with session:
            await anext(session)
        with anyio.fail_after(15), suppress(ConfigError):
            async with session:
                assert (await anext(session)).is_redelivered
