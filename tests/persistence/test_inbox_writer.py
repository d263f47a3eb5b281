"""The inbox writer: its promises while the server pauses, keys are foreign, callers are cancelled and brokers close."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any

import anyio
import pytest

from rsmq import Broker, Letter, Settings
from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError, ScriptError, TooLarge
from rsmq.model.keys import Keys
from rsmq.persistence.inbox_writer import MOST_DEVICES, MOST_LETTERS, MOST_PER_ROUND, InboxWriter, Receipt
from rsmq.persistence.letter import pack_letter
from rsmq.redis.client.script_batcher import Call
from tests.patience import until
from tests.servers import Server

SOON = 30.0
"""No test waits so long unless something is wrong."""
QUICK = timedelta(milliseconds=200)


@pytest.fixture
async def broker(server_url: str, prefix: str, no_task_left: None) -> AsyncIterator[Broker]:
    """A connected broker on the shared server."""
    async with Broker(Settings(url=server_url, prefix=prefix, preflight="warn")) as connected:
        yield connected


@pytest.fixture
def make_broker(own_server: Server, prefix: str) -> Callable[..., Broker]:
    """A broker on that server with a short command timeout."""

    def make(**overrides: object) -> Broker:
        values = {"url": own_server.url, "prefix": prefix, "preflight": "warn", "command_timeout": QUICK}
        return Broker(Settings(**{**values, **overrides}))

    return make


async def stored(broker: Broker, device: str = "phone") -> list[Any]:
    """The payloads of all letters of a device, in order."""
    found, after = list[Any](), 0
    while letters := await broker.devices.peek(device, after, 1000):
        found += [letter.payload for letter in letters]
        after = letters[-1].seq
    return found


async def warned(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait until the log contains the text."""
    await until(lambda: text in caplog.text, f"the log says {text!r}")


# -- servers that do not answer ------------------------------------------------------------------------------------


async def test_send_during_a_pause_is_repeated_and_stored_once(
    own_server: Server, make_broker: Callable[..., Broker], caplog: pytest.LogCaptureFixture
) -> None:
    """A write without a reply in time is repeated, and its letter is stored once."""
    caplog.set_level(logging.WARNING, "rsmq.inbox")
    async with make_broker() as broker:
        await broker.send("phone", 0)
        own_server.pause()
        try:
            sending = [asyncio.ensure_future(broker.send("phone", n)) for n in range(1, 5)]
            await warned(caplog, "calls wait for the server")
            assert not any(each.done() for each in sending)
        finally:
            own_server.resume()
        with anyio.fail_after(SOON):
            await asyncio.gather(*sending)
        assert await stored(broker) == [0, 1, 2, 3, 4]


async def test_send_during_a_restart_waits_for_the_server(
    own_server: Server, make_broker: Callable[..., Broker], caplog: pytest.LogCaptureFixture
) -> None:
    """The restarted server has also lost its scripts."""
    caplog.set_level(logging.WARNING, "rsmq.inbox")
    async with make_broker() as broker:
        await broker.send("phone", "lost with its memory")
        own_server.kill()
        sending = asyncio.ensure_future(broker.send_many(("phone", n) for n in range(3)))
        await warned(caplog, "calls wait for the server")
        await anyio.to_thread.run_sync(own_server.start)
        with anyio.fail_after(SOON):
            await sending
        assert await stored(broker) == [0, 1, 2]


async def test_send_fails_when_the_server_stays_away(own_server: Server, make_broker: Callable[..., Broker]) -> None:
    """Every sender gets the error; when the server is back, sending works again."""
    async with make_broker(unavailable_timeout=QUICK) as broker:
        await broker.send("phone", 0)
        own_server.kill()
        for attempt in (broker.send("phone", 1), broker.send_many([("phone", 2), ("tablet", 3)])):
            with anyio.fail_after(SOON), pytest.raises(BrokerUnavailable):
                await attempt
        await anyio.to_thread.run_sync(own_server.start)
        with anyio.fail_after(SOON):
            while True:
                try:
                    await broker.send("phone", 4)
                    break
                except BrokerUnavailable:
                    continue  # the pause between two attempts may be longer than this broker's patience
        async with make_broker() as patient:
            assert (await stored(patient))[-1] == 4


async def test_waiting_senders_fail_when_the_broker_closes(
    own_server: Server, make_broker: Callable[..., Broker], caplog: pytest.LogCaptureFixture
) -> None:
    """Calls of `send` and `send_many` fail instead of waiting for ever, also one that came just before the close."""
    caplog.set_level(logging.WARNING, "rsmq.inbox")
    broker = make_broker()
    async with broker:
        await broker.send("phone", 0)
        own_server.pause()
        sending = [asyncio.ensure_future(broker.send("phone", n)) for n in range(3)]
        sending.append(asyncio.ensure_future(broker.send_many(("tablet", n) for n in range(3 * MOST_PER_ROUND))))
        await warned(caplog, "calls wait for the server")
        writer = broker._connection.inboxes.writer
    own_server.resume()
    sending.append(asyncio.ensure_future(writer.send("watch", 1, "", None, None)))  # was on its way through the broker
    with anyio.fail_after(SOON):
        results = await asyncio.gather(*sending, return_exceptions=True)
    assert [(type(each), "closed" in str(each)) for each in results] == [(BrokerUnavailable, True)] * 5
    with pytest.raises(ConfigError, match="async with broker"):
        await broker.send("phone", 1)


async def test_flushed_scripts_are_sent_again(broker: Broker) -> None:
    """This works for every script of an inbox."""
    for n in range(3):
        await broker.client.execute_command("SCRIPT", "FLUSH")
        await broker.send_many((name, n) for name in ("phone", "tablet"))
        async with broker.connect("phone", clean=True) as session:
            await broker.client.execute_command("SCRIPT", "FLUSH")
            await broker.send_many([("phone", "a"), ("phone", "b")])
            with anyio.fail_after(SOON):
                one, other = await anext(session), await anext(session)
            await broker.client.execute_command("SCRIPT", "FLUSH")
            await session.receive(one)
            await session.ack(one)
            await session.ack(other)
    assert await stored(broker, "tablet") == [0, 1, 2]
    assert await stored(broker) == []


# -- one that fails ---------------------------------------------------------------------------------------------------


async def test_foreign_key_fails_only_its_device(broker: Broker) -> None:
    """A key of another type fails the letters of its own device until it is deleted."""
    names = [f"phone-{n}" for n in range(5)]
    await broker.client.execute_command("SET", broker.keys.inbox("phone-2"), "foreign")
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        await broker.send_many((name, n) for n in range(2) for name in names)
    results = await asyncio.gather(*(broker.send(name, 2) for name in names), return_exceptions=True)
    assert [type(each) for each in results] == [type(None), type(None), type(results[2]), type(None), type(None)]
    assert isinstance(results[2], BrokerError)
    assert not isinstance(results[2], BrokerUnavailable), "it is not worth another try"
    await broker.client.execute_command("DEL", broker.keys.inbox("phone-2"))
    await broker.send_many((name, 3) for name in names)
    for name in names:
        assert await stored(broker, name) == ([3] if name == "phone-2" else [0, 1, 2, 3])


async def test_send_many_raises_the_error_of_its_iterable(broker: Broker) -> None:
    """Letters before the error are stored once, and the broker keeps working."""

    def letters() -> Iterator[tuple[str, int]]:
        for n in range(MOST_PER_ROUND + 10):
            yield "phone", n
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await broker.send_many(letters())
    await broker.send("phone", "after")
    assert await stored(broker) == [*range(MOST_PER_ROUND + 10), "after"]


@pytest.mark.parametrize(
    ("letter", "error"),
    [
        (("", 1), ConfigError),
        (("x" * 257, 1), ConfigError),
        (("bad\ud800", 1), ConfigError),
        (("phone", b"x" * (256 * 1024 + 1)), TooLarge),
    ],
)
async def test_send_many_with_a_wrong_letter_stores_what_came_before(
    broker: Broker, letter: tuple[str, Any], error: type[Exception]
) -> None:
    """The call ends at the wrong letter; later ones are not stored."""
    with pytest.raises(error):
        await broker.send_many([("phone", 1), letter, ("phone", 2)])
    await broker.send("phone", 3)
    assert await stored(broker) == [1, 3]


async def test_cancelled_sender_does_not_affect_other_senders(broker: Broker) -> None:
    """Letters that share a write with a cancelled one are stored once."""
    for turns in range(8):
        sending = [asyncio.ensure_future(broker.send(f"phone-{turns}", n)) for n in range(9)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for each in sending[::3]:
            each.cancel()
        results = await asyncio.gather(*sending, return_exceptions=True)
        assert not [each for each in results if isinstance(each, Exception)]
        await broker.send(f"phone-{turns}", 9)
        found = await stored(broker, f"phone-{turns}")
        assert found == sorted(set(found))
        assert {1, 2, 4, 5, 7, 8, 9} <= set(found)


# -- many -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, MOST_PER_ROUND, MOST_PER_ROUND + 1, 3 * MOST_PER_ROUND + 7])
async def test_send_many_of_any_size_stores_all_letters(broker: Broker, count: int) -> None:
    """All letters, also empty ones, are stored when the call returns, in order per device."""
    names = ("phone", "tablet", "watch")
    await broker.send_many((names[n % 3], b"") for n in range(count))
    for index, name in enumerate(names):
        assert len(await stored(broker, name)) == len(range(index, count, 3))


async def test_send_many_to_more_devices_than_one_call_takes(broker: Broker) -> None:
    """Devices that do not fit into one script call go with the next one."""
    names = [f"phone-{n}" for n in range(2 * MOST_DEVICES + 3)]
    await broker.send_many((name, name) for name in names)
    assert [await stored(broker, name) for name in names] == [[name] for name in names]


async def test_send_many_of_large_letters_keeps_order(broker: Broker) -> None:
    """Rounds and batches are bounded by bytes, too."""
    await broker.send_many(("phone", b"%02d" % n + b"x" * 200_000) for n in range(16))
    assert [each[:2] for each in await stored(broker)] == [b"%02d" % n for n in range(16)]


async def test_concurrent_sends_keep_the_order_of_the_calls(broker: Broker) -> None:
    """Calls do not wait for each other, and are stored in their order."""
    await asyncio.gather(*(broker.send("phone", n) for n in range(2 * MOST_LETTERS + 5)))
    assert await stored(broker) == list(range(2 * MOST_LETTERS + 5))


async def test_two_send_many_to_one_device_keep_their_orders(broker: Broker) -> None:
    """Each call keeps its own order, and no letter is lost."""

    async def send(who: str) -> None:
        await broker.send_many(("phone", [who, n]) for n in range(1200))

    await asyncio.gather(send("a"), send("b"))
    found = await stored(broker)
    for who in "ab":
        assert [n for by, n in found if by == who] == list(range(1200))


async def test_old_source_positions_are_pruned(broker: Broker, server_url: str, prefix: str) -> None:
    """A device keeps source positions for the dedup window; repetitions of recent sources are still recognised."""
    await broker.send("phone", 0)
    session = broker.keys.session("phone")
    old = [part for n in range(60) for part in (f"source:~{n}", "0000000000000001@1")]
    await broker.client.execute_command("HSET", session, *old)
    async with Broker(Settings(url=server_url, prefix=prefix, preflight="warn")) as other:
        await other.send("phone", 1)
    fields = {name async for name in sources(broker, session)}
    assert len(fields) == 2
    assert not fields & set(old)
    await broker.send("phone", 2)
    assert await stored(broker) == [0, 1, 2]


async def sources(broker: Broker, session: str) -> AsyncIterator[str]:
    """The sources whose positions a device keeps."""
    for name in await broker.client.execute_command("HKEYS", session):
        if name.startswith(b"source:"):
            yield name.decode()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expires", [timedelta(0), timedelta(seconds=-1), timedelta(seconds=2**32), 5, 0.5, "1"])
async def test_send_with_an_impossible_expiry_is_refused(broker: Broker, expires: Any) -> None:
    """Zero, negative, too long, or without a unit: the error says what to use, and nothing is stored."""
    for attempt in (broker.send("phone", 1, expires=expires), broker.send_many([("phone", 1)], expires=expires)):
        with pytest.raises(ConfigError, match=r"use a duration above 0 and up to 49710 days|has no unit"):
            await attempt
    with pytest.raises(ConfigError, match=r"use a duration above 0|has no unit"):
        broker.deliver("alerts", to=lambda alert: "phone", expires=expires)
    assert await broker.devices.find("phone") is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"topic": "t" * 256}, "256 bytes: use at most 255"),
        ({"topic": "\ud800"}, "not valid Unicode"),
        ({"headers": {"a": 1}}, "names and values must be str"),
        ({"headers": {"a": "\ud800"}}, "not valid Unicode"),
        ({"headers": {"a": "x" * 65_536}}, "use at most 32768"),
    ],
)
async def test_send_with_oversized_arguments_is_refused(broker: Broker, arguments: dict[str, Any], text: str) -> None:
    """The error names the limit, and nothing is stored."""
    with pytest.raises(ConfigError, match=text):
        await broker.send("phone", 1, **arguments)
    assert await broker.devices.find("phone") is None


async def test_send_of_a_too_large_payload_is_refused(broker: Broker) -> None:
    """The error has both sizes and an alternative; nothing is sent."""
    with pytest.raises(TooLarge, match="262145 bytes, the limit 262144: store it elsewhere"):
        await broker.send("phone", b"x" * 262_145)
    await broker.send("phone", b"x" * 262_144)
    (letter,) = await broker.devices.peek("phone")
    assert isinstance(letter, Letter)
    assert len(letter.data) == 262_144


# -- replies given by the test -----------------------------------------------------------------------------------------


class ManualBatcher:
    """A batcher whose replies the test gives."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def add(self, call: Call) -> None:
        """Take it."""
        self.calls.append(call)


@pytest.fixture
def batcher() -> ManualBatcher:
    """A batcher without calls."""
    return ManualBatcher()


@pytest.fixture
def writer(batcher: ManualBatcher, settings: Settings, keys: Keys) -> InboxWriter:
    """A writer whose batcher is controlled by the test."""
    return InboxWriter(batcher, keys, settings, is_cluster=False)  # type: ignore[arg-type]


async def turn() -> None:
    """Let the event loop run what is due."""
    for _ in range(3):
        await asyncio.sleep(0)


def letter_at(position: int) -> bytes:
    """A letter of a topic."""
    return pack_letter(b"%040d" % position, b"", b"", b"\0\0\0\0")


def put(writer: InboxWriter, device: str, position: int) -> Receipt:
    """Queue a letter of a topic."""
    receipt = Receipt()
    writer.put((device,), "source:t", letter_at(position), receipt)
    return receipt


async def test_queue_has_one_batch_in_flight(writer: InboxWriter, batcher: ManualBatcher) -> None:
    """Later letters of a device wait for the reply; other devices do not wait."""
    put(writer, "phone", 1)
    await turn()
    later, other = put(writer, "phone", 2), put(writer, "tablet", 2)
    await turn()
    assert [len(call.keys) for call in batcher.calls] == [3, 3]
    batcher.calls[1].done([b"OK", 1, 0, 0, 0])
    assert (other.missing, later.missing) == (0, 1)
    batcher.calls[0].done([b"OK", 1, 0, 0, 0])
    await turn()
    assert len(batcher.calls) == 3
    assert later.missing == 1
    batcher.calls[2].done([b"OK", 1, 0, 0, 0])
    assert later.missing == 0
    assert repr(writer) == "<InboxWriter queues=0>"


async def test_failed_batch_fails_the_batches_behind_it(writer: InboxWriter, batcher: ManualBatcher) -> None:
    """They are not sent: their higher positions would exclude the failed letters for ever. Later letters are sent."""
    first = put(writer, "phone", 1)
    await turn()
    behind = [put(writer, "phone", position) for position in range(2, MOST_LETTERS + 10)]
    error = BrokerUnavailable("gone")
    batcher.calls[0].done(error)
    await turn()
    assert len(batcher.calls) == 1
    for receipt in (first, *behind):
        with pytest.raises(BrokerUnavailable, match="gone"):
            await receipt.complete()
    again = put(writer, "phone", 1)
    await turn()
    batcher.calls[1].done([b"OK", 1, 0, 0, 0])
    await again.complete()


async def test_batches_of_a_failed_call_are_sent_alone(writer: InboxWriter, batcher: ManualBatcher) -> None:
    """A script error comes from one batch: each is repeated alone, and only the one that fails again fails."""
    receipts = [put(writer, name, 1) for name in ("a", "b", "c")]
    await turn()
    (together,) = batcher.calls
    together.done(ScriptError("WRONGTYPE"))
    alone = batcher.calls[1:]
    assert [len(call.keys) for call in alone] == [3, 3, 3]
    for call, reply in zip(alone, ([b"OK", 0, 0, 0, 0], ScriptError("WRONGTYPE"), [b"OK", 1, 0, 0, 0]), strict=True):
        call.done(reply)
    assert [type(receipt.error) for receipt in receipts] == [type(None), ScriptError, type(None)]
    assert [receipt.missing for receipt in receipts] == [0, 0, 0]


async def test_batches_of_an_unavailable_server_are_not_sent_alone(writer: InboxWriter, batcher: ManualBatcher) -> None:
    """When the call has run out of time, so have all its batches."""
    receipts = [put(writer, name, 1) for name in ("a", "b")]
    await turn()
    batcher.calls[0].done(BrokerUnavailable("gone"))
    assert len(batcher.calls) == 1
    assert all(isinstance(receipt.error, BrokerUnavailable) for receipt in receipts)


async def test_letters_behind_refused_ones_are_sent_again(writer: InboxWriter, batcher: ManualBatcher) -> None:
    """The receipts say which ones were refused, and are complete when the rest is stored."""
    receipts = [put(writer, "phone", position) for position in range(1, 5)]
    await turn()
    batcher.calls[0].done([b"OK", 0, 0, 0, 2, b"REFUSED:1:2:3"])
    assert [receipt.missing for receipt in receipts] == [1, 1, 1, 1]
    refused = [letter_at(position) for position in (2, 3)]
    assert receipts[0].refused == tuple(("phone", "source:t", letter) for letter in refused)
    assert letter_at(4) in batcher.calls[1].packed
    assert not any(each in batcher.calls[1].packed for each in map(letter_at, (1, 2, 3)))
    batcher.calls[1].done([b"OK", 1, 0, 0, 0])
    assert [receipt.missing for receipt in receipts] == [0, 0, 0, 0]
    last = put(writer, "phone", 5)
    await turn()
    batcher.calls[2].done([b"OK", 0, 0, 0, 1, b"REFUSED:1:1:1"])
    assert (last.missing, len(last.refused), len(batcher.calls)) == (0, 1, 3)


async def test_unexpected_reply_is_an_error_of_the_sender(writer: InboxWriter, batcher: ManualBatcher) -> None:
    """Any reply but OK is an error, not a stored letter."""
    receipt = put(writer, "phone", 1)
    await turn()
    batcher.calls[0].done([b"WHAT"])
    with pytest.raises(BrokerError, match="WHAT"):
        await receipt.complete()


async def test_receipt_without_batches_is_complete() -> None:
    """It does not wait."""
    await Receipt().complete()
