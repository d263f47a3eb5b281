"""The post: what senders are promised while servers pause, keys are foreign, callers give up and brokers close."""

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
from rsmq.keys import Keys
from rsmq.persistence.courier import Call
from rsmq.persistence.post import MOST_DEVICES, MOST_LETTERS, MOST_PER_ROUND, Post
from rsmq.persistence.receipt import Receipt
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
def own_server() -> Iterator[Server]:
    """A server that this test may pause and kill."""
    with Server() as server:
        yield server


@pytest.fixture
def make_broker(own_server: Server, prefix: str) -> Callable[..., Broker]:
    """A broker on that server, which soon takes silence for a broken connection."""

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
    """Until the log says it."""
    await until(lambda: text in caplog.text, f"the log says {text!r}")


# -- servers that do not answer ------------------------------------------------------------------------------------


async def test_the_server_pauses(
    own_server: Server, make_broker: Callable[..., Broker], caplog: pytest.LogCaptureFixture
) -> None:
    """A write whose answer did not come in time is repeated until there is one, and is stored once."""
    caplog.set_level(logging.WARNING, "rsmq.courier")
    async with make_broker() as broker:
        await broker.send("phone", 0)
        own_server.pause()
        try:
            sending = [asyncio.ensure_future(broker.send("phone", n)) for n in range(1, 5)]
            await warned(caplog, "inboxes wait for the server")
            assert not any(each.done() for each in sending)
        finally:
            own_server.resume()
        with anyio.fail_after(SOON):
            await asyncio.gather(*sending)
        assert await stored(broker) == [0, 1, 2, 3, 4]


async def test_the_server_is_away(
    own_server: Server, make_broker: Callable[..., Broker], caplog: pytest.LogCaptureFixture
) -> None:
    """Senders wait for a server that is being restarted, and which has forgotten the scripts by then."""
    caplog.set_level(logging.WARNING, "rsmq.courier")
    async with make_broker() as broker:
        await broker.send("phone", "lost with its memory")
        own_server.kill()
        sending = asyncio.ensure_future(broker.send_many(("phone", n) for n in range(3)))
        await warned(caplog, "inboxes wait for the server")
        await anyio.to_thread.run_sync(own_server.start)
        with anyio.fail_after(SOON):
            await sending
        assert await stored(broker) == [0, 1, 2]


async def test_patience_ends(own_server: Server, make_broker: Callable[..., Broker]) -> None:
    """A server that stays away is an error of every sender; when it is back, so is the post."""
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


async def test_the_broker_closes_while_senders_wait(
    own_server: Server, make_broker: Callable[..., Broker], caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever still waits then is told; nobody waits for ever, whether it has sent one, many, or only just now."""
    caplog.set_level(logging.WARNING, "rsmq.courier")
    broker = make_broker()
    async with broker:
        await broker.send("phone", 0)
        own_server.pause()
        sending = [asyncio.ensure_future(broker.send("phone", n)) for n in range(3)]
        sending.append(asyncio.ensure_future(broker.send_many(("tablet", n) for n in range(3 * MOST_PER_ROUND))))
        await warned(caplog, "inboxes wait for the server")
        post = broker._connection.office.post
    own_server.resume()
    sending.append(asyncio.ensure_future(post.send("watch", 1, "", None, None)))  # was on its way through the broker
    with anyio.fail_after(SOON):
        results = await asyncio.gather(*sending, return_exceptions=True)
    assert [(type(each), "closed" in str(each)) for each in results] == [(BrokerUnavailable, True)] * 5
    with pytest.raises(ConfigError, match="async with broker"):
        await broker.send("phone", 1)


async def test_scripts_are_forgotten(broker: Broker) -> None:
    """A server that has dropped its script cache gets the sources again, for every script of an inbox."""
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


async def test_a_foreign_key_harms_one_device(broker: Broker) -> None:
    """A key of another type fails the letters of its own device only, and only until it is gone."""
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


async def test_an_error_in_the_iterable(broker: Broker) -> None:
    """Its error is raised; what it gave before is stored once, and the broker goes on."""

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
async def test_a_wrong_letter_among_many(broker: Broker, letter: tuple[str, Any], error: type[Exception]) -> None:
    """It ends the call; those before it are stored, those behind it are not."""
    with pytest.raises(error):
        await broker.send_many([("phone", 1), letter, ("phone", 2)])
    await broker.send("phone", 3)
    assert await stored(broker) == [1, 3]


async def test_a_cancelled_sender_disturbs_nobody(broker: Broker) -> None:
    """Whoever gives up while its letter is on the way leaves those beside it as they are; none is stored twice."""
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
async def test_many_rounds(broker: Broker, count: int) -> None:
    """However many letters, and however short, all are stored when the call returns, in order per device."""
    names = ("phone", "tablet", "watch")
    await broker.send_many((names[n % 3], b"") for n in range(count))
    for place, name in enumerate(names):
        assert len(await stored(broker, name)) == len(range(place, count, 3))


async def test_more_devices_than_a_call_takes(broker: Broker) -> None:
    """Devices that do not fit into one script call go with the next."""
    names = [f"phone-{n}" for n in range(2 * MOST_DEVICES + 3)]
    await broker.send_many((name, name) for name in names)
    assert [await stored(broker, name) for name in names] == [[name] for name in names]


async def test_large_letters(broker: Broker) -> None:
    """Rounds and parcels are bounded by bytes, too."""
    await broker.send_many(("phone", b"%02d" % n + b"x" * 200_000) for n in range(16))
    assert [each[:2] for each in await stored(broker)] == [b"%02d" % n for n in range(16)]


async def test_concurrent_senders_keep_their_order(broker: Broker) -> None:
    """Calls made one after the other are stored so, though none waits for the one before."""
    await asyncio.gather(*(broker.send("phone", n) for n in range(2 * MOST_LETTERS + 5)))
    assert await stored(broker) == list(range(2 * MOST_LETTERS + 5))


async def test_two_calls_of_many_share_a_device(broker: Broker) -> None:
    """Each keeps its own order; nothing of either is lost."""

    async def send(who: str) -> None:
        await broker.send_many(("phone", [who, n]) for n in range(1200))

    await asyncio.gather(send("a"), send("b"))
    found = await stored(broker)
    for who in "ab":
        assert [n for by, n in found if by == who] == list(range(1200))


async def test_old_marks_are_pruned(broker: Broker, server_url: str, prefix: str) -> None:
    """A device with many senders remembers those of the dedup window only; a young sender's repetition is known."""
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
    """The senders that a device remembers."""
    for name in await broker.client.execute_command("HKEYS", session):
        if name.startswith(b"source:"):
            yield name.decode()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expiry", [timedelta(0), timedelta(seconds=-1), timedelta(seconds=2**32), 5, 0.5, "PT1S"])
async def test_expiries_that_are_refused(broker: Broker, expiry: Any) -> None:
    """None, a negative, an endless one, or a number without a unit: told what to use, nothing stored."""
    for attempt in (broker.send("phone", 1, expiry=expiry), broker.send_many([("phone", 1)], expiry=expiry)):
        with pytest.raises(ConfigError, match="use a timedelta above 0 and up to 49710 days"):
            await attempt
    with pytest.raises(ConfigError, match="use a timedelta above 0"):
        broker.deliver("alerts", to=lambda alert: "phone", expiry=expiry)
    assert await broker.devices.find("phone") is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"topic": "t" * 256}, "256 bytes: use at most 255"),
        ({"headers": {"a": 1}}, "names and values must be str"),
        ({"headers": {"a": "x" * 65_536}}, "use at most 32768"),
    ],
)
async def test_arguments_that_are_refused(broker: Broker, arguments: dict[str, Any], text: str) -> None:
    """One line that names the limit, nothing stored."""
    with pytest.raises(ConfigError, match=text):
        await broker.send("phone", 1, **arguments)
    assert await broker.devices.find("phone") is None


async def test_a_payload_that_is_too_large(broker: Broker) -> None:
    """Refused before anything is sent, with both numbers and a way out."""
    with pytest.raises(TooLarge, match="262145 bytes, the limit 262144: store it elsewhere"):
        await broker.send("phone", b"x" * 262_145)
    await broker.send("phone", b"x" * 262_144)
    (letter,) = await broker.devices.peek("phone")
    assert isinstance(letter, Letter)
    assert len(letter.data) == 262_144


# -- by hand ----------------------------------------------------------------------------------------------------------


class Hand:
    """A courier whose replies the test gives."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def carry(self, call: Call) -> None:
        """Take it."""
        self.calls.append(call)


@pytest.fixture
def hand() -> Hand:
    """Nothing carried yet."""
    return Hand()


@pytest.fixture
def post(hand: Hand, settings: Settings, keys: Keys) -> Post:
    """A post whose courier is the test."""
    return Post(hand, keys, settings, is_cluster=False)  # type: ignore[arg-type]


async def turn() -> None:
    """Let what is due in the event loop happen."""
    for _ in range(3):
        await asyncio.sleep(0)


def put(post: Post, device: str, position: int) -> Receipt:
    """A letter of a topic."""
    receipt = Receipt()
    post.put(device, "source:t", f"{position:040d}", b"", b"", b"\0\0\0\0", receipt)
    return receipt


async def test_one_parcel_of_a_line_is_under_way(post: Post, hand: Hand) -> None:
    """What comes meanwhile waits for the answer, for nothing may overtake; other devices do not wait."""
    put(post, "phone", 1)
    await turn()
    later, other = put(post, "phone", 2), put(post, "tablet", 2)
    await turn()
    assert [len(call.keys) for call in hand.calls] == [4, 4]
    hand.calls[1].done([b"OK", 1, 0, 0, 0])
    assert (other.missing, later.missing) == (0, 1)
    hand.calls[0].done([b"OK", 1, 0, 0, 0])
    await turn()
    assert len(hand.calls) == 3
    assert later.missing == 1
    hand.calls[2].done([b"OK", 1, 0, 0, 0])
    assert later.missing == 0
    assert repr(post) == "<Post lines=0>"


async def test_a_failing_parcel_takes_those_behind_it_with_it(post: Post, hand: Hand) -> None:
    """They are not even sent: their marks would hide the gap for ever. What comes after the error is sent again."""
    first = put(post, "phone", 1)
    await turn()
    behind = [put(post, "phone", position) for position in range(2, MOST_LETTERS + 10)]
    error = BrokerUnavailable("gone")
    hand.calls[0].done(error)
    await turn()
    assert len(hand.calls) == 1
    for receipt in (first, *behind):
        with pytest.raises(BrokerUnavailable, match="gone"):
            await receipt.complete()
    again = put(post, "phone", 1)
    await turn()
    hand.calls[1].done([b"OK", 1, 0, 0, 0])
    await again.complete()


async def test_parcels_of_a_failed_van_go_alone(post: Post, hand: Hand) -> None:
    """A script error is of one of them: each is tried by itself, and only the one that fails again is failed."""
    receipts = [put(post, name, 1) for name in ("a", "b", "c")]
    await turn()
    (together,) = hand.calls
    together.done(ScriptError("WRONGTYPE"))
    alone = hand.calls[1:]
    assert [len(call.keys) for call in alone] == [4, 4, 4]
    for call, reply in zip(alone, ([b"OK", 0, 0, 0, 0], ScriptError("WRONGTYPE"), [b"OK", 1, 0, 0, 0]), strict=True):
        call.done(reply)
    assert [type(receipt.error) for receipt in receipts] == [type(None), ScriptError, type(None)]
    assert [receipt.missing for receipt in receipts] == [0, 0, 0]


async def test_an_unavailable_server_is_not_tried_in_parts(post: Post, hand: Hand) -> None:
    """When patience has ended for a van it has for each of its parcels."""
    receipts = [put(post, name, 1) for name in ("a", "b")]
    await turn()
    hand.calls[0].done(BrokerUnavailable("gone"))
    assert len(hand.calls) == 1
    assert all(isinstance(receipt.error, BrokerUnavailable) for receipt in receipts)


async def test_a_reply_that_nobody_expects(post: Post, hand: Hand) -> None:
    """Anything but OK is an error of the sender, not a stored letter."""
    receipt = put(post, "phone", 1)
    await turn()
    hand.calls[0].done([b"WHAT"])
    with pytest.raises(BrokerError, match="WHAT"):
        await receipt.complete()


async def test_a_receipt_of_nothing_is_complete() -> None:
    """Who has sent nothing waits for nothing."""
    await Receipt().complete()
