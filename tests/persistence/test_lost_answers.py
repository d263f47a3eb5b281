"""Calls of a device that were executed, whose answer was lost, and that are repeated after another client's call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from datetime import timedelta

import anyio
import pytest

from rsmq import Broker, Letter, Session, SessionTaken, Settings
from rsmq.redis.scripts import (
    ACK_LETTERS,
    ADD_LETTERS,
    CLEAR_INBOX,
    CLOSE_SESSION,
    OPEN_SESSION,
    PAGE_LETTERS,
    RECEIVE_LETTERS,
    Script,
)
from tests.persistence.lost_answers import LostAnswers
from tests.persistence.sessions import SOON, take
from tests.servers import Server

Made = Callable[[str], Broker]


@pytest.fixture(scope="module")
def tcp_server() -> Iterator[Server]:
    """A server behind the proxy."""
    with Server(tcp=True) as server:
        yield server


@pytest.fixture
async def proxy(tcp_server: Server) -> AsyncIterator[LostAnswers]:
    """The way of the older gateway."""
    async with LostAnswers(tcp_server.port) as proxy:
        yield proxy


@pytest.fixture
def make(prefix: str) -> Made:
    """A broker by its address. Its sessions practically never poll."""
    return lambda url: Broker(Settings(url=url, prefix=prefix, preflight="warn", inbox_poll=timedelta(hours=1)))


async def test_connect_repeated_after_a_newer_one_leaves_the_newer_session(
    make: Made, proxy: LostAnswers, tcp_server: Server
) -> None:
    """The device has connected to another gateway in between: the repeat is refused and takes nothing."""
    async with make(proxy.url) as old, make(tcp_server.url) as new, AsyncExitStack() as stack:
        await new.send_many(("phone", n) for n in range(3))
        newer = list[Session]()

        async def connect() -> None:
            newer.append(await stack.enter_async_context(new.connect("phone")))

        proxy.lose(OPEN_SESSION, between=connect)
        with anyio.fail_after(SOON), pytest.raises(SessionTaken):
            async with old.connect("phone"):
                pass
        assert proxy.lost == 1
        letters = await take(newer[0], 3)
        for letter in letters:
            await newer[0].ack(letter)
        await newer[0].flush()
        device = await new.devices.find("phone")
        assert device is not None
        assert device.backlog == 0


async def test_storm_of_connects_with_lost_answers_leaves_the_newest(
    make: Made, proxy: LostAnswers, tcp_server: Server
) -> None:
    """Ten gateways, each connecting when the answer of the one before was lost: only the last gets the session."""
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(make(proxy.url)) for _ in range(9)]
        direct = await stack.enter_async_context(make(tcp_server.url))
        await direct.send_many(("phone", n) for n in range(100))
        opened, refused = list[Session](), list[int]()

        async def connect(number: int) -> None:
            if number < 9:
                proxy.lose(OPEN_SESSION, between=lambda: connect(number + 1))
            try:
                session = [*gateways, direct][number].connect("phone", clean=number == 5)
                opened.append(await stack.enter_async_context(session))
            except SessionTaken:
                refused.append(number)

        with anyio.fail_after(SOON):
            await connect(0)
        assert (proxy.lost, sorted(refused), len(opened)) == (9, list(range(9)), 1)
        await direct.send_many(("phone", n) for n in range(100, 150))
        assert [letter.payload for letter in await take(opened[0], 50)] == list(range(100, 150))


async def test_clean_connect_repeated_keeps_letters_that_came_in_between(
    make: Made, proxy: LostAnswers, tcp_server: Server
) -> None:
    """The inbox is emptied once, by the first execution."""
    async with make(proxy.url) as broker, make(tcp_server.url) as sender:
        await sender.send("phone", "old")
        proxy.lose(OPEN_SESSION, between=lambda: sender.send("phone", "new"))
        async with broker.connect("phone", clean=True, auto_ack=True) as session:
            assert not session.is_present
            assert [(letter.payload, letter.is_redelivered) for letter in await take(session, 1)] == [("new", False)]
        assert proxy.lost == 1


@pytest.mark.parametrize("script", [PAGE_LETTERS, ACK_LETTERS, RECEIVE_LETTERS, CLOSE_SESSION], ids=repr)
async def test_call_of_an_older_session_repeated_touches_nothing_of_the_newer_one(
    make: Made, proxy: LostAnswers, tcp_server: Server, script: Script
) -> None:
    """The device connects elsewhere between execution and repeat: the older session ends, the newer one reads on."""
    async with make(proxy.url) as old, make(tcp_server.url) as new, AsyncExitStack() as stack:
        await new.send_many(("phone", n) for n in range(5))
        newer, told = list[Session](), False

        async def connect() -> None:
            newer.append(await stack.enter_async_context(new.connect("phone")))

        try:
            async with old.connect("phone") as session:
                if script is PAGE_LETTERS:
                    proxy.lose(script, between=connect)
                one, other, *_ = await take(session, 5)
                if script is not PAGE_LETTERS:
                    proxy.lose(script, between=connect)
                if script is ACK_LETTERS:
                    await session.ack(one)
                    await session.flush()
                if script is RECEIVE_LETTERS:
                    await session.receive(other)
                    await session.flush()
        except SessionTaken:
            told = True
        assert (proxy.lost, told) == (1, script is not CLOSE_SESSION)
        expected = {ACK_LETTERS: [2, 3, 4, 5]}.get(script, [1, 2, 3, 4, 5])
        letters = await take(newer[0], len(expected))
        assert [letter.seq for letter in letters] == expected
        assert [letter.seq for letter in letters if letter.is_received] == ([2] if script is RECEIVE_LETTERS else [])
        await new.send("phone", "next")
        assert [letter.payload for letter in await take(newer[0], 1)] == ["next"]


async def test_letters_added_again_after_a_clean_start_stay_away(
    make: Made, proxy: LostAnswers, tcp_server: Server
) -> None:
    """The device has emptied its inbox between execution and repeat: the letter was in it, and does not come back."""
    async with make(proxy.url) as sender, make(tcp_server.url) as gateway:

        async def clean() -> None:
            async with gateway.connect("phone", clean=True):
                pass

        proxy.lose(ADD_LETTERS, between=clean)
        await sender.send("phone", "before")
        assert proxy.lost == 1
        async with gateway.connect("phone", auto_ack=True) as session:
            await sender.send("phone", "after")
            assert [letter.payload for letter in await take(session, 1)] == ["after"]


async def test_letters_added_again_after_an_acknowledgement_are_stored_once(
    make: Made, proxy: LostAnswers, tcp_server: Server
) -> None:
    """The device has received and acknowledged the letters between execution and repeat."""
    async with make(proxy.url) as sender, make(tcp_server.url) as gateway, gateway.connect("phone") as session:

        async def receive() -> None:
            for letter in await take(session, 3):
                await session.ack(letter)
            await session.flush()

        proxy.lose(ADD_LETTERS, between=receive)
        await sender.send_many(("phone", n) for n in range(3))
        assert proxy.lost == 1
        device = await gateway.devices.find("phone")
        assert device is not None
        assert (device.seq, device.backlog) == (3, 0)


async def test_chunk_of_a_clean_start_repeated_leaves_later_letters(
    make: Made, proxy: LostAnswers, tcp_server: Server
) -> None:
    """Letters that come while the old ones are removed in steps stay."""
    async with make(proxy.url) as gateway, make(tcp_server.url) as sender:
        await sender.send_many(("phone", n) for n in range(1500))
        proxy.lose(CLEAR_INBOX, times=2, between=lambda: sender.send("phone", "new"))
        async with gateway.connect("phone", clean=True, auto_ack=True) as session:
            assert [letter.payload for letter in await take(session, 2)] == ["new", "new"]
        assert proxy.lost == 2


async def test_device_that_moves_between_gateways_with_lost_answers_gets_all_letters_in_order(
    make: Made, tcp_server: Server
) -> None:
    """A tenth of all answers is lost, the sender's too. The device moves thirty times, and its older sessions go on
    reading and acknowledging until they get that error: each letter is stored once, and none comes again after its
    acknowledgement was confirmed."""
    total, confirmed, order = 1500, set[int](), list[int]()
    async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        proxies = [await stack.enter_async_context(LostAnswers(tcp_server.port, share=0.1)) for _ in range(3)]
        sender, *gateways = [await stack.enter_async_context(make(proxy.url)) for proxy in proxies]

        async def send() -> None:
            for start in range(0, total, 25):
                await sender.send_many(("phone", n) for n in range(start, start + 25))

        async def go_on(session: Session, letter: Letter) -> None:
            with suppress(SessionTaken):
                while True:
                    await session.ack(letter)
                    await session.flush()
                    await anext(session)
            await session.__aexit__(None, None, None)

        tasks.start_soon(send)
        for move in range(31):
            session = await gateways[move % 2].connect("phone", window=40).__aenter__()
            last, acked = 0, set[int]()
            while last < total if move == 30 else len(acked) < 15:
                (letter,) = await take(session, 1)
                assert letter.seq > last, f"OutOfOrder: {letter} after {last}"
                assert letter.seq not in confirmed, f"MoreThanOnce: {letter}"
                last, is_new = letter.seq, letter.payload not in order
                if is_new:
                    order.append(letter.payload)
                if move == 30 or not is_new or letter.payload % 3:
                    acked.add(letter.seq)
                    await session.ack(letter)
            await session.flush()
            confirmed |= acked
            if move < 30:
                tasks.start_soon(go_on, session, letter)
            else:
                await session.__aexit__(None, None, None)
        assert order == list(range(total))
        assert all(proxy.lost for proxy in proxies)
        found = await sender.devices.find("phone")
        assert found is not None
        assert (found.seq, found.backlog, found.dropped) == (total, 0, 0)
