"""Holds: nothing of a name starts, nothing is counted, others go on; breakers with one probe."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tenacity import wait_fixed

from rsmq import Breaker, Broker, Concurrency, ConfigError, Hold, Message, Rate, Reject, RetryPolicy, Settings
from rsmq.consumer.consumer import Consumer
from rsmq.handler.handler import build_handler
from rsmq.inspector import Inspector
from rsmq.model.clock import monotonic
from rsmq.redis.holds import hold_name
from rsmq.testing.proxy import Proxy
from tests.consumer.members import consumer_of
from tests.contract.witness import settled
from tests.patience import until
from tests.servers import Server


def provider(message: Message) -> str | None:
    """What the limits of this file count by."""
    return message.headers.get("provider")


class Provider:
    """What handlers have called: (name, n) and attempt. `says(name)` may raise."""

    def __init__(self) -> None:
        self.calls: list[tuple[str | None, int]] = []
        self.attempts: list[int] = []
        self.says: Callable[[str | None], None] = lambda _name: None
        self.open = asyncio.Event()
        self.open.set()

    async def call(self, order: dict[str, int], message: Message) -> None:
        """One call."""
        self.calls.append((provider(message), order["n"]))
        self.attempts.append(message.attempt)
        self.says(provider(message))
        await self.open.wait()

    def count(self, name: str | None) -> int:
        """Calls for a name."""
        return Counter(each for each, _ in self.calls)[name]


def down(_name: str | None) -> None:
    """What a provider says that is away."""
    raise OSError("down")


def works(_name: str | None) -> None:
    """What it says otherwise."""


Make = Callable[..., Broker]


@pytest.fixture
def make(server_url: str, prefix: str) -> Make:
    """Makes members of one group."""

    def member(called: Provider, **options: Any) -> Broker:
        broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn"))

        @broker.handler("t", group="g", **options)
        async def handle(order: dict[str, int], message: Message) -> None:
            await called.call(order, message)

        return broker

    return member


def knows(consumer: Consumer) -> bool:
    """Whether a member knows of a hold."""
    return consumer.holds is not None and bool(consumer.holds.names)


def is_calm(consumer: Consumer) -> bool:
    """Whether the server knows of all that a member holds, and no message tries a name."""
    holds = consumer.holds
    return holds is not None and not holds._probes and not holds._unconfirmed


async def publish(broker: Broker, name: str | None, count: int, first: int = 0, key: bool = True) -> None:
    """So many messages of a name, each with its own key or none."""
    for n in range(first, first + count):
        headers = {} if name is None else {"provider": name}
        await broker.publish("t", {"n": n}, key=f"{name}{n}" if key else None, headers=headers)


LIMITS: list[dict[str, Any]] = [
    {"rate": Rate(1000, by=provider)},
    {"rate": [Rate(1000, by=provider), Rate(1000), Rate(1000, by="key")]},
    {"group_concurrency": Concurrency(64, by=provider)},
    {"rate": Rate(1000, by=provider), "ordering": "none"},
    {"rate": Rate(1000, by=provider), "distribution": "shared"},
]


@pytest.mark.parametrize("options", LIMITS)
async def test_hold_of_a_handler_lets_nothing_of_its_name_start_and_counts_nothing(
    make: Make, options: dict[str, Any]
) -> None:
    """One call has learned it, in one of two members; the others wait, with their first attempt to come."""
    called, raised = Provider(), list[str | None]()

    def not_now(name: str | None) -> None:
        if name == "twilio" and not raised:
            raised.append(name)
            raise Hold("1h")

    called.says = not_now
    retry = RetryPolicy(max_attempts=1, uncounted_for="1ms")
    brokers = [make(called, retry=retry, **options), make(called, retry=retry, **options)]
    async with brokers[0].running(), brokers[1].running():
        members = [consumer_of(broker) for broker in brokers]
        await until(lambda: all(len(each.membership.live) == 2 for each in members), "they see each other")
        await publish(brokers[0], "twilio", 1)
        await until(lambda: raised and all(map(knows, members)), "both know it")
        await publish(brokers[0], "twilio", 12, first=1)
        await publish(brokers[0], "other", 5)
        await until(lambda: called.count("other") == 5, "other names go on")
        await until(
            lambda: sum(each.queue.held for each in members) == 13, "all of the name waits, also what raised it"
        )
        assert called.count("twilio") == 1
        (hold,) = await brokers[0].holds("t")
        assert (hold.group, hold.held.name, hold.held.kind) == ("g", "twilio", "handler")
        assert await brokers[0].end_hold("t", "twilio") == 1
        await until(lambda: called.count("twilio") == 14, "all start as soon as it ends")
        await settled(brokers[0], "t")
        assert await brokers[0].holds("t") == ()
        assert set(called.attempts) == {1}, "nothing was counted, though one attempt is all they have"
        assert await brokers[0].end_hold("t", "twilio") == 0


async def test_hold_survives_its_members_and_a_reset(make: Make) -> None:
    """It is the group's: members that start later know it, and it ends at its time."""
    called = Provider()
    async with make(called, rate=Rate(1000, by=provider)).running() as broker:
        await broker.hold("t", "twilio", "1h", group="g")
        await until(lambda: knows(consumer_of(broker)), "it knows it")
        await publish(broker, "twilio", 3)
        await until(lambda: consumer_of(broker).queue.held == 3, "they wait")
    async with make(called, rate=Rate(1000, by=provider)).running() as broker:
        await until(lambda: consumer_of(broker).queue.held == 3, "they wait in the next member")
        assert called.calls == []
        await broker.hold("t", "twilio", "10ms")
        await until(lambda: called.count("twilio") == 3, "a shorter one replaces it, and ends by itself")
        assert set(called.attempts) == {1}, "none has started before"
        await broker.hold("t", "twilio", "1h")
        await until(lambda: knows(consumer_of(broker)), "it knows it")
        await broker.reset_group("t", "g")
        await until(lambda: consumer_of(broker).queue.held == 3, "a reset lets all of it come again, and wait")
        assert called.count("twilio") == 3
        await broker.end_hold("t", "twilio")
        await until(lambda: called.count("twilio") == 6, "they start")
        await settled(broker, "t")


async def test_everything_of_a_group_is_held_by_a_command(make: Make) -> None:
    """Also what has no name, and in a handler whose limit has none."""
    for options in ({"rate": Rate(1000, by=provider)}, {"rate": Rate(1000)}, {"group_concurrency": 4}):
        called = Provider()
        async with make(called, **options).running() as broker:
            await broker.publish("t", {"n": 0})
            await until(lambda: len(called.calls) == 1, "it runs")  # noqa: B023
            await broker.hold("t", None, "1h")
            await until(lambda: knows(consumer_of(broker)), "it knows it")
            await publish(broker, None, 3, first=1)
            await until(lambda: consumer_of(broker).queue.held == 3, "they wait")
            assert len(called.calls) == 1
            await broker.end_hold("t", None)
            await until(lambda: len(called.calls) == 4, "they start")  # noqa: B023
            await settled(broker, "t")


async def test_hold_that_is_over_is_shown_no_more(make: Make) -> None:
    """The server keeps it until the next call: what operators see has no end that is past, but what a breaker holds
    waits for its try."""
    broker = make(Provider(), rate=Rate(1000, per="1s", by=provider), breaker=Breaker(failures=9, hold="1s"))
    async with broker.running():
        await broker.hold("t", "c", "1h")
        await hold_name(broker.client, broker.keys, "t", "g", "b", 1, "breaker")
        await broker.hold("t", "a", "1ms")

        async def shown() -> bool:
            return [each.held.name for each in await broker.holds("t")] == ["b", "c"]

        await until(shown, "the list has what is held")
        (state,) = await Inspector(broker.client, broker.keys, broker.settings).groups("t")
        assert [each.name for each in state.holds] == ["b", "c"]
        assert await broker.end_hold("t", "a") == 0
        assert await broker.end_hold("t", "c") == 1


async def test_hold_in_a_handler_without_limits_holds_its_message_alone(make: Make) -> None:
    """It waits uncounted, with its key; others go on."""
    called, raised = Provider(), list[str | None]()

    def not_now(name: str | None) -> None:
        if name == "twilio" and len(raised) < 2:
            raised.append(name)
            raise Hold("20ms")

    called.says = not_now
    async with make(called, retry=RetryPolicy(max_attempts=1)).running() as broker:
        await publish(broker, "twilio", 1)
        await publish(broker, "other", 3)
        await until(lambda: (called.count("twilio"), called.count("other")) == (3, 3), "all are handled")
        await settled(broker, "t")
    assert set(called.attempts) == {1}


async def test_breaker_holds_a_name_and_lets_one_message_try_it(make: Make) -> None:
    """Two members: each time that the hold is over, there is one call in one of them. When it succeeds, all follow."""
    called, is_down = Provider(), True

    def down(name: str | None) -> None:
        if name == "twilio" and is_down:
            raise OSError("down")

    called.says = down
    retry = RetryPolicy(max_attempts=100, wait=wait_fixed(0))
    options = {"breaker": Breaker(3, "10m", by=provider), "concurrency": 1, "retry": retry}
    brokers = [make(called, **options), make(called, **options)]
    async with brokers[0].running(), brokers[1].running():
        client, keys = brokers[0].client, brokers[0].keys
        members = [consumer_of(broker) for broker in brokers]

        async def held_for_minutes() -> bool:
            (hold,) = await brokers[0].holds("t")
            return (hold.held.name, hold.held.kind) == ("twilio", "breaker") and hold.held.until_ms > soon

        soon = 1000 * int((await client.execute_command("TIME"))[0]) + 300_000
        await until(lambda: all(len(each.membership.live) == 2 for each in members), "they see each other")
        await publish(brokers[0], "twilio", 30)
        await until(lambda: sum(each.queue.held for each in members) == 30, "it has opened, and all wait")
        calls = called.count("twilio")
        assert 3 <= calls <= 2 * 3, "what had started, in each member"
        await publish(brokers[0], "other", 5)
        await until(lambda: called.count("other") == 5, "other names go on")
        for number in (1, 2):
            await until(lambda: all(map(is_calm, members)), "the server knows of it")
            await until(held_for_minutes, "the hold has begun again")
            await hold_name(client, keys, "t", "g", "twilio", 1, "breaker")
            await until(lambda: called.count("twilio") == calls + number, "one message has tried it")  # noqa: B023
        await until(lambda: all(map(is_calm, members)), "the server knows of it")
        await until(held_for_minutes, "the hold has begun again")
        assert sum(each.stats["opened"] for each in members) <= 2
        is_down = False
        await hold_name(client, keys, "t", "g", "twilio", 1, "breaker")
        await settled(brokers[0], "t")
        assert called.count("twilio") == calls + 2 + 30
        assert await brokers[0].holds("t") == ()


async def test_message_that_tries_a_name_starts_before_another_suspect_of_its_tenant(make: Make) -> None:
    """Two workers have died with them, so one at a time is started. One in a closed flow gives way to it."""
    called, left = Provider(), 1

    def fails_once(_name: str | None) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError("down")

    called.says = fails_once
    retry = RetryPolicy(max_attempts=100, wait=wait_fixed(0))
    broker = make(called, breaker=Breaker(1, "20ms", by=provider), tenant=lambda _: "acme", retry=retry)
    async with broker:
        await publish(broker, "twilio", 12)
        for number in (await broker.topics.existing("t")).numbers:
            stream, execute = broker.keys.stream("t", number), broker.client.execute_command
            await execute("XGROUP", "CREATE", stream, "g", "0", "MKSTREAM")
            for row in await execute("XREADGROUP", "GROUP", "g", "dead", "STREAMS", stream, ">") or ():
                await execute("XCLAIM", stream, "g", "dead", 0, *[entry for entry, _ in row[1]], "RETRYCOUNT", 2)
        async with broker.running():
            await settled(broker, "t")
    assert called.count("twilio") == 13


async def test_messages_wait_no_more_when_the_server_knows_of_no_hold(make: Make) -> None:
    """It ended before the server heard of it, or was ended by another member: what waits here is let go at once."""
    called = Provider()
    called.says = down
    retry = RetryPolicy(max_attempts=100, wait=wait_fixed(0))
    broker = make(called, breaker=Breaker(1, "10m", by=provider), retry=retry, concurrency=1)
    async with broker.running():
        consumer = consumer_of(broker)
        await publish(broker, "twilio", 3)
        await until(lambda: consumer.queue.held == 3 and is_calm(consumer), "all wait")
        called.says = works
        held = consumer.holds
        assert held is not None
        await broker.client.execute_command("HDEL", broker.keys.group("t", "g"), "holds")
        # it is over, before the member hears what the server knows: it ignores older looks
        held.saw(b'{"twilio":[1,1,"breaker"]}', monotonic())
        await until(
            lambda: called.count("twilio") == 4,
            "they start, and not only when the member looks again after a minute",
            seconds=40,
        )


async def test_an_older_look_at_the_group_brings_no_hold_back(make: Make) -> None:
    """The server was asked before the message that tried the name had succeeded; its answer comes after that."""
    called = Provider()
    called.says = down
    retry = RetryPolicy(max_attempts=100, wait=wait_fixed(0))
    broker = make(called, breaker=Breaker(1, "10m", by=provider), retry=retry, concurrency=1)
    async with broker.running():
        consumer = consumer_of(broker)
        await publish(broker, "twilio", 2)
        await until(lambda: consumer.queue.held == 2 and is_calm(consumer), "both wait")
        held, asked = consumer.holds, monotonic()
        text = await broker.client.execute_command("HGET", broker.keys.group("t", "g"), "holds")
        called.says = works
        assert held is not None
        assert held.names
        await hold_name(broker.client, broker.keys, "t", "g", "twilio", 1, "breaker")
        await until(lambda: called.count("twilio") == 3 and not held.names, "one has tried it, the other has followed")
        held.saw(text, asked)
        assert held.names == ()


async def test_hold_of_a_breaker_ends_although_another_name_is_held_meanwhile() -> None:
    """The member hears of the other hold while its own call is on its way, and of nothing later."""
    called = Provider()
    called.says = down
    retry = RetryPolicy(max_attempts=100, wait=wait_fixed(0))
    async with AsyncExitStack() as scene:
        server = scene.enter_context(Server(tcp=True))
        proxy = await scene.enter_async_context(Proxy(server.port))
        other = await scene.enter_async_context(Broker(Settings(url=server.url, preflight="warn")))
        broker = Broker(Settings(url=proxy.url, preflight="warn"))

        @broker.handler("t", group="g", breaker=Breaker(1, "10m", by=provider), retry=retry, concurrency=1)
        async def handle(order: dict[str, int], message: Message) -> None:
            await called.call(order, message)

        await scene.enter_async_context(broker.running())
        consumer, group = consumer_of(broker), broker.keys.group("t", "g")
        await publish(broker, "twilio", 2)
        await until(lambda: consumer.queue.held == 2 and is_calm(consumer), "both wait")
        called.says = works
        proxy.hold(lambda data: b"\r\nend\r\n" in data and b"twilio" in data)
        await hold_name(other.client, broker.keys, "t", "g", "twilio", 1, "breaker")
        await until(lambda: proxy.is_holding, "one message has tried it, and the server is being told")
        await hold_name(other.client, broker.keys, "t", "g", "another", 600_000, "command")
        assert consumer.holds is not None
        consumer.holds.saw(await other.client.execute_command("HGET", group, "holds"), monotonic() + 3600)
        proxy.release()
        await until(lambda: called.count("twilio") == 3, "the other message has followed")
        assert [each.name for each in consumer.holds.names] == ["another"]


@pytest.mark.parametrize("odd", ["", "\ud800", "x" * 300])
@pytest.mark.parametrize("is_breaker", [False, True])
async def test_hold_of_an_odd_name_holds_no_other_one(make: Make, odd: str, is_breaker: bool) -> None:
    """An empty text, such as that of a header which is missing, was the name of everything; text that is not Unicode
    ended the worker."""

    def named(message: Message) -> str:
        return message.headers.get("provider", odd)

    def refuse(name: str | None) -> None:
        if name is None:
            raise OSError("down") if is_breaker else Hold("1h")

    called = Provider()
    called.says = refuse
    options = {"breaker": Breaker(1, "1h", by=named)} if is_breaker else {"rate": Rate(1000, by=named)}
    async with make(called, retry=RetryPolicy(max_attempts=1), **options).running() as broker:
        await publish(broker, None, 1)
        await until(lambda: knows(consumer_of(broker)), "it is held")
        await publish(broker, None, 1, first=1)
        await publish(broker, "twilio", 3)
        await until(lambda: called.count("twilio") == 3, "others go on")
        await until(lambda: is_calm(consumer_of(broker)), "the server knows of it")
        (held,) = await broker.holds("t")
        assert await broker.end_hold("t", held.held.name) == 1
        called.says = works
        await until(lambda: (None, 1) in called.calls, "it is held no longer")


async def test_breaker_counts_failures_in_a_row_and_only_of_its_types(make: Make) -> None:
    """A success, a rejected message or another error between them begins anew."""
    called, script = Provider(), ["fail", "fail", "ok", "fail", "reject", "fail", "fail", "other"]
    errors = {"fail": OSError("down"), "reject": Reject("bad"), "other": ValueError("bug")}

    def answer(_name: str | None) -> None:
        word = script.pop(0)
        if word in errors:
            raise errors[word]

    called.says = answer
    retry = RetryPolicy(max_attempts=1)
    breaker = Breaker(3, "1h", on=OSError)
    async with make(called, breaker=breaker, concurrency=1, ordering="partition", retry=retry).running() as broker:
        for n in range(8):
            await broker.publish("t", {"n": n}, key="k")
        await until(lambda: not script, "all were called")
        await settled(broker, "t")
        assert consumer_of(broker).stats["opened"] == 0
        script += ["fail"] * 3
        for n in range(5):
            await broker.publish("t", {"n": n}, key="k")
        await until(lambda: consumer_of(broker).stats["opened"] == 1, "it has opened")
        await until(lambda: is_calm(consumer_of(broker)), "the server knows of it")
        assert not script
        await broker.end_hold("t", None)
        script += ["ok"] * 2
        await until(lambda: not script, "by command it ends at once")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"breaker": 5}, "breaker=5 is not a Breaker: write"),
        ({"breaker": Breaker(5), "batch": 2}, "breaker counts single messages"),
    ],
)
def test_impossible_breakers_are_refused(options: dict[str, Any], problem: str) -> None:
    """What cannot work is refused when it is registered."""

    async def handle(order: dict[str, int]) -> None: ...

    async def handle_all(orders: list[dict[str, int]]) -> None: ...

    with pytest.raises(ConfigError, match=problem):
        build_handler(handle_all if "batch" in options else handle, "t", group="g", **options)


@pytest.mark.parametrize(
    ("make_it", "problem"),
    [
        (lambda: Breaker(0), "after 0 failures"),
        (lambda: Breaker(hold="0s"), "cannot hold for 0 s"),
        (lambda: Breaker(by="key"), "by 'key' is unknown"),  # type: ignore[arg-type]
        (lambda: Breaker(on="OSError"), "on 'OSError' is not possible"),  # type: ignore[arg-type]
        (lambda: Hold("30s", ""), "a hold of the name ''"),
        (lambda: Concurrency(0), "a concurrency of 0"),
        (lambda: Concurrency(1, by="tenant"), "by 'tenant' is unknown"),  # type: ignore[arg-type]
    ],
)
def test_impossible_values_are_refused(make_it: Callable[[], object], problem: str) -> None:
    """With what to write instead."""
    with pytest.raises(ConfigError, match=problem):
        make_it()


async def test_impossible_holds_by_command_are_refused(make: Make) -> None:
    """With what there is."""
    async with make(Provider(), rate=Rate(5, by=provider)).running() as broker:
        with pytest.raises(ConfigError, match="has no group 'x': the groups are g"):
            await broker.hold("t", "twilio", "1s", group="x")
        with pytest.raises(ConfigError, match="a hold for 0 s is not possible"):
            await broker.hold("t", "twilio", "0s")
        with pytest.raises(ConfigError, match="'' is no name"):
            await broker.end_hold("t", "")


@pytest.mark.parametrize("options", [{}, {"batch": 2}], ids=["no limit", "batch"])
async def test_hold_of_a_handler_that_would_go_on_is_refused(
    server_url: str, prefix: str, options: dict[str, Any]
) -> None:
    """Where this program has the handlers of all groups that would be held."""
    broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn"))

    @broker.handler("t", group="g", **options)
    async def handle(orders: list[Any]) -> None: ...

    @broker.handler("t", group="limited", rate=Rate(5))
    async def limited(order: Any) -> None: ...

    async with broker:
        await broker.topics.ensure("t", 1)
        for group in ("g", "limited"):
            await broker.client.execute_command("XGROUP", "CREATE", broker.keys.stream("t", 0), group, "0", "MKSTREAM")
        with pytest.raises(ConfigError, match=r"nothing would be held: the handlers of g for 't'.*pause_group"):
            await broker.hold("t", None, "1m", group="g")
        await broker.hold("t", None, "1m")
        assert {each.group for each in await broker.holds("t")} == {"g", "limited"}
