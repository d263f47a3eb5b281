"""What a session promises its device: order, window, acknowledgement, redelivery, takeover, waking."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import anyio
import pytest

from rsmq import Broker, Letter, SessionTaken, Settings
from rsmq.errors import BrokerUnavailable
from rsmq.persistence.letter import PACKET_IDS
from tests.patience import until
from tests.persistence.sessions import SOON, take, waits
from tests.servers import Server


async def backlog(broker: Broker, device: str = "phone") -> int:
    """How many letters are stored."""
    found = await broker.devices.find(device)
    return 0 if found is None else found.backlog


async def field(broker: Broker, name: str, device: str = "phone") -> str:
    """A field of the session hash."""
    value = await broker.client.execute_command("HGET", broker.keys.session(device), name)
    return "" if value is None else str(value.decode())


# -- the window -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 7])
async def test_session_never_exceeds_its_window(broker: Broker, window: int) -> None:
    """With a full window no letter leaves the inbox; one ack releases exactly one."""
    await broker.send_many(("phone", n) for n in range(20))
    async with broker.connect("phone", window=window) as session:
        out = await take(session, window)
        waiting = asyncio.ensure_future(anext(session))
        for n in range(20, 30):
            await broker.send("phone", n)
        assert not waiting.done()
        assert await field(broker, "sent") == str(window)
        await session.ack(out[-1])
        with anyio.fail_after(SOON):
            assert (await waiting).seq == window + 1
        assert await field(broker, "sent") == str(window + 1)


async def test_acks_in_any_order_remove_their_letters(broker: Broker) -> None:
    """Letters come in order, and none stays behind."""
    await broker.send_many(("phone", n) for n in range(300))
    got, out = list[int](), list[Letter]()
    async with broker.connect("phone", window=13) as session:
        while len(got) < 300:
            if len(out) == 13 or (out and random.random() < 0.5):
                await session.ack(out.pop(random.randrange(len(out))))
            else:
                out += await take(session, 1)
                got.append(out[-1].payload)
        for letter in out:
            await session.ack(letter)
            await session.ack(letter)  # saying it again is harmless
    assert got == list(range(300))
    assert await backlog(broker) == 0


async def test_received_letter_stays_in_the_window(broker: Broker) -> None:
    """`receive` makes no room in the window, `ack` does."""
    await broker.send_many(("phone", n) for n in range(3))
    async with broker.connect("phone", window=1) as session:
        (letter,) = await take(session, 1)
        await session.receive(letter)
        await session.flush()
        waiting = asyncio.ensure_future(anext(session))
        await broker.send("phone", 3)
        assert not waiting.done()
        await session.ack(letter)
        with anyio.fail_after(SOON):
            assert (await waiting).payload == 1


# -- acknowledging ------------------------------------------------------------------------------------------------


async def test_unacknowledged_letters_come_again_first(broker: Broker) -> None:
    """They come in order and marked, received ones included; then the new ones, unmarked."""
    await broker.send_many(("phone", n) for n in range(5))
    async with broker.connect("phone") as session:
        letters = await take(session, 4)
        assert not any(letter.is_redelivered for letter in letters)
        await session.ack(letters[1])
        await session.receive(letters[2])
    async with broker.connect("phone", auto_ack=True) as session:
        assert session.is_present
        await broker.send("phone", 5)
        again = await take(session, 5)
        assert [letter.seq for letter in again] == [1, 3, 4, 5, 6]
        # the fifth was on its way to the first connection, which has not read it: it cannot be told apart
        assert [letter.is_redelivered for letter in again] == [True, True, True, True, False]
        assert [letter.is_received for letter in again] == [False, True, False, False, False]
        assert (again[1].payload, again[2].payload) == (None, 3)
    assert await backlog(broker) == 0


async def test_flush_and_leaving_wait_for_acks(broker: Broker) -> None:
    """After `flush` the server has the acks; leaving the block flushes, too, also after an error."""
    await broker.send_many(("phone", n) for n in range(3))

    async def fail() -> None:
        async with broker.connect("phone") as session:
            one, other, _ = await take(session, 3)
            await session.ack(one)
            await session.flush()
            assert await backlog(broker) == 2
            await session.ack(other)
            raise LookupError

    with pytest.raises(LookupError):
        await fail()
    assert await backlog(broker) == 1


async def test_auto_ack_acknowledges_when_the_loop_goes_on(broker: Broker) -> None:
    """The last letter is acknowledged when the loop ends without an error."""
    await broker.send_many(("phone", n) for n in range(5))
    async with broker.connect("phone", auto_ack=True) as session:
        await take(session, 2)
        await session.flush()
        assert await backlog(broker) == 4
        async for letter in session:
            if letter.payload == 2:
                break
    assert await backlog(broker) == 2

    async def fail() -> None:
        async with broker.connect("phone", auto_ack=True) as session:
            await take(session, 1)
            raise LookupError

    with pytest.raises(LookupError):
        await fail()
    assert await backlog(broker) == 2, "a failed handler does not acknowledge"


async def test_acks_from_other_tasks_are_taken(broker: Broker) -> None:
    """One task reads, others acknowledge; many acks share few calls."""
    await broker.send_many(("phone", n) for n in range(500))
    async with broker.connect("phone", window=50) as session, anyio.create_task_group() as tasks:
        for _ in range(500):
            tasks.start_soon(session.ack, *await take(session, 1))
    assert await backlog(broker) == 0


async def test_cancelled_wait_loses_no_letter(broker: Broker) -> None:
    """A read is cancelled at any moment: the next one gets the letters, in order and unmarked."""
    await broker.send_many(("phone", n) for n in range(200))
    got = list[Letter]()
    async with broker.connect("phone", window=3, auto_ack=True) as session:
        for turns in (0, 1, 2, 3, 5, 8, 13) * 30:
            waiting = asyncio.ensure_future(anext(session))
            for _ in range(turns):
                await asyncio.sleep(0)
            if not waiting.done():
                waiting.cancel()
            try:
                got.append(await waiting)
            except asyncio.CancelledError:
                continue
        got += await take(session, 200 - len(got))
    assert [letter.payload for letter in got] == list(range(200))
    assert not any(letter.is_redelivered for letter in got)


# -- taking over --------------------------------------------------------------------------------------------------


async def test_takeover_ends_every_step_of_the_old_session(broker: Broker, make_broker: Callable[..., Broker]) -> None:
    """The waiting session is woken at once; reading, acknowledging and flushing all raise SessionTaken."""
    await broker.send("phone", 0)
    async with make_broker() as other, broker.connect("phone") as old:
        (letter,) = await take(old, 1)
        waiting = asyncio.ensure_future(anext(old))
        await waits(broker)
        async with other.connect("phone") as new:
            with anyio.fail_after(SOON), pytest.raises(SessionTaken, match="'phone' has connected elsewhere"):
                await waiting
            for step in (lambda: old.ack(letter), lambda: old.receive(letter), old.flush, lambda: anext(old)):
                with pytest.raises(SessionTaken):
                    await step()
            (again,) = await take(new, 1)
            assert (again.seq, again.is_redelivered) == (1, True)
            await new.ack(again)
    assert await backlog(broker) == 0


async def test_takeover_without_a_ring_is_found_by_the_next_page(broker: Broker) -> None:
    """Late acks are an error at the end of the block, not a silent loss; the letter comes again."""
    await broker.send("phone", 0)

    async def overtaken() -> None:
        async with broker.connect("phone") as old:
            (letter,) = await take(old, 1)
            async with broker.connect("phone") as new:
                await old.ack(letter)
                assert [each.seq for each in await take(new, 1)] == [1]

    with pytest.raises(SessionTaken):
        await overtaken()
    assert await backlog(broker) == 1


async def test_concurrent_takeovers_leave_one_session(broker: Broker, make_broker: Callable[..., Broker]) -> None:
    """Of twenty simultaneous sessions of one device one stays, and gets every letter."""
    await broker.send_many(("phone", n) for n in range(10))
    taken = 0
    async with make_broker() as other:
        sessions = [through.connect("phone") for through in (broker, other) * 10]
        await asyncio.gather(*(session.__aenter__() for session in sessions))
        left = max(sessions, key=lambda session: int(session.epoch))
        assert len({session.epoch for session in sessions}) == 20
        for session in sessions:
            if session is left:
                got = [letter.payload for letter in await take(session, 10)]
            else:
                with anyio.fail_after(SOON), pytest.raises(SessionTaken):
                    await anext(session)
                taken += 1
            await session.__aexit__(None, None, None)
    assert (got, taken) == (list(range(10)), 19)


async def test_clean_session_starts_with_an_empty_inbox(broker: Broker) -> None:
    """Earlier letters are gone, also unacknowledged ones; later ones come; `is_present` is false."""
    await broker.send_many(("phone", n) for n in range(2500))
    async with broker.connect("phone") as session:
        assert session.is_present
        await take(session, 10)
    async with broker.connect("phone", clean=True, auto_ack=True) as session:
        assert not session.is_present
        assert await backlog(broker) == 0
        await broker.send("phone", "new")
        (letter,) = await take(session, 1)
        assert (letter.seq, letter.payload, letter.is_redelivered) == (2501, "new", False)
    async with broker.connect("unknown") as session:
        assert not session.is_present


async def test_session_continues_after_a_purge(broker: Broker) -> None:
    """An operator empties the inbox of a connected device: it gets later letters."""
    await broker.send_many(("phone", n) for n in range(50))
    async with broker.connect("phone", window=5, auto_ack=True) as session:
        await take(session, 5)
        await session.flush()
        assert await broker.devices.purge("phone") == 46
        await broker.send("phone", "new")
        rest = [letter.payload for letter in await take(session, 1)]
    assert rest == ["new"]


# -- waking -----------------------------------------------------------------------------------------------------------


async def test_letter_wakes_a_waiting_session(broker: Broker, make_broker: Callable[..., Broker]) -> None:
    """A letter from another broker arrives at once, repeatedly."""
    async with make_broker() as sender, broker.connect("phone", auto_ack=True) as session:
        for n in range(20):
            waiting = asyncio.ensure_future(anext(session))
            await waits(broker)
            await sender.send("phone", n)
            with anyio.fail_after(SOON):
                assert (await waiting).payload == n


async def test_lost_ring_is_made_good_by_the_poll(make_broker: Callable[..., Broker]) -> None:
    """Without a ring the session polls."""
    async with make_broker(inbox_poll=timedelta(milliseconds=300)) as broker, broker.connect("phone") as session:
        waiting = asyncio.ensure_future(anext(session))
        await waits(broker)
        await broker.client.execute_command("HSET", broker.keys.session("phone"), "idle", "0")
        await broker.send("phone", "unheard")
        with anyio.fail_after(SOON):
            assert (await waiting).payload == "unheard"


async def test_session_continues_after_its_doorbell_is_cut(broker: Broker) -> None:
    """The new subscription rings, because the broken one may have missed a ring."""
    async with broker.connect("phone", auto_ack=True) as session:
        for n in range(3):
            waiting = asyncio.ensure_future(anext(session))
            await waits(broker)
            await broker.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            await broker.send("phone", n)
            with anyio.fail_after(SOON):
                assert (await waiting).payload == n


async def test_session_continues_after_its_connections_are_cut(broker: Broker) -> None:
    """Every connection is cut repeatedly while letters are sent, read and acknowledged: none is lost or repeated."""
    got, sent = list[Letter](), 400

    async def cut() -> None:
        for kind in ("normal", "pubsub"):
            with suppress(BrokerUnavailable):  # it may cut its own connection
                await broker.client.execute_command("CLIENT", "KILL", "TYPE", kind)

    async def send() -> None:
        for n in range(sent):
            await broker.send("phone", n)

    async with broker.connect("phone", window=10) as session, anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        with anyio.fail_after(60):
            while len(got) < sent:
                got.append(await anext(session))
                await session.ack(got[-1])
                if got[-1].seq % 40 == 1:
                    await cut()
            await session.flush()
    assert [letter.payload for letter in got] == list(range(sent))
    assert [letter.seq for letter in got] == list(range(1, sent + 1)), "a repeated write stored nothing twice"
    assert await backlog(broker) == 0


async def test_full_server_can_be_emptied_by_acks() -> None:
    """On a server out of memory letters can be read and acknowledged, and a sender waits for room."""
    with Server() as server:
        async with Broker(Settings(url=server.url, preflight="warn")) as broker:
            await broker.send_many(("phone", n) for n in range(10))
            await broker.client.execute_command("CONFIG", "SET", "maxmemory", 1)
            async with broker.connect("phone", auto_ack=True) as session:
                assert [letter.payload for letter in await take(session, 10)] == list(range(10))
                sending = asyncio.ensure_future(broker.send("phone", 10))
                await session.flush()
                assert not sending.done()
                await broker.client.execute_command("CONFIG", "SET", "maxmemory", 0)
                assert [letter.payload for letter in await take(session, 1)] == [10]
                await sending


# -- expiry -----------------------------------------------------------------------------------------------------------


async def test_expired_letters_are_not_delivered(broker: Broker) -> None:
    """The expired ones are skipped and counted, the others keep their order."""
    await broker.send("phone", "a", expires=timedelta(hours=1))
    await broker.send("phone", "b", expires=timedelta(milliseconds=1))
    await broker.send("phone", "c")
    with anyio.fail_after(SOON):
        while await broker.client.execute_command("EXISTS", broker.keys.letter("phone", 2)):
            await anyio.sleep(0.001)
    async with broker.connect("phone", auto_ack=True) as session:
        letters = await take(session, 2)
    assert [letter.payload for letter in letters] == ["a", "c"]
    assert letters[0].expires - letters[0].timestamp == timedelta(hours=1)
    assert letters[1].expires - letters[1].timestamp == timedelta(days=7)
    device = await broker.devices.find("phone")
    assert device is not None
    assert (device.expired, device.dropped, device.backlog) == (1, 0, 0)


# -- many -------------------------------------------------------------------------------------------------------------


async def test_thousand_sessions_each_get_their_letters(broker: Broker) -> None:
    """They share one task group and a few connections; nothing is left open afterwards."""
    names = [f"phone-{n}" for n in range(1000)]

    async def connections() -> int:
        return len((await broker.client.execute_command("CLIENT", "LIST")).splitlines())

    async with broker.connect("first"):
        tasks, connected = len(asyncio.all_tasks()), await connections()
        sessions = [broker.connect(name, auto_ack=True) for name in names]
        await asyncio.gather(*(session.__aenter__() for session in sessions))
        assert len(asyncio.all_tasks()) == tasks
        assert await connections() <= connected + 2, "the pool of questions may have grown, not with the sessions"
        waiting = [asyncio.ensure_future(anext(session)) for session in sessions]
        for name in names[::100]:
            await waits(broker, name)
        await broker.send_many((name, name) for name in names)
        with anyio.fail_after(60):
            assert [(await each).payload for each in waiting] == names
        await asyncio.gather(*(session.__aexit__(None, None, None) for session in sessions))
        assert len(asyncio.all_tasks()) == tasks
        channels = [broker.keys.wake(name) for name in names]
        counts = await broker.client.execute_command("PUBSUB", "SHARDNUMSUB", *channels)
        assert not any(counts[1::2])
    assert sum([await backlog(broker, name) for name in names[::50]]) == 0


# -- packet ids -------------------------------------------------------------------------------------------------------


async def test_letter_waits_while_the_device_holds_its_packet_id(
    broker: Broker, make_broker: Callable[..., Broker], caplog: pytest.LogCaptureFixture
) -> None:
    """The device has not acknowledged a letter that expired a round ago: its packet id is not given again."""
    await broker.send("phone", "old", expires=timedelta(hours=1))
    async with broker.connect("phone") as session:
        (old,) = await take(session, 1)
        purged = await broker.devices.purge("phone")
        await broker.client.execute_command("HSET", broker.keys.session("phone"), "seq", PACKET_IDS - 1)
        await broker.send_many(("phone", text) for text in ("before", "same id", "after"))
        (before,) = await take(session, 1)
        assert (purged, before.payload) == (1, "before")
        waiting = asyncio.ensure_future(anext(session))
        await until(lambda: "waits for its packet id 1" in caplog.text, "the session has said so")
        await session.ack(before)
        await session.flush()
        assert not waiting.done()
        await session.ack(old)
        with anyio.fail_after(SOON):
            rest = [await waiting, *await take(session, 1)]
        assert [(letter.payload, letter.packet_id) for letter in rest] == [("same id", 1), ("after", 2)]
        await session.ack(old)  # late, and of a letter that is gone: it frees no id
        waiting = asyncio.ensure_future(anext(session))
        await broker.send("phone", "last")
        with anyio.fail_after(SOON):
            assert (await waiting).payload == "last"
    assert caplog.text.count("waits for its packet id") == 1


async def test_unacknowledged_letter_keeps_its_packet_id_for_a_round(broker: Broker) -> None:
    """One letter stays out while 66 000 others pass through the session: no id is out twice, none is lost."""
    got, out = 0, dict[int, int]()
    async with broker.connect("phone", window=500) as session:
        await broker.send("phone", -1)
        (stuck,) = await take(session, 1)
        out[stuck.packet_id] = stuck.seq
        for start in range(0, 66_000, 3000):
            await broker.send_many(("phone", n) for n in range(start, start + 3000))
            for n in range(start, start + 3000):
                (letter,) = await take(session, 1)
                assert letter.payload == n
                assert letter.packet_id not in out, f"{letter} has the packet id of {stuck}"
                await session.ack(letter)
                got += 1
        await session.ack(stuck)
    assert (got, await backlog(broker)) == (66_000, 0)
