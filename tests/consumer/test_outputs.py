"""Outputs leave with the settlement of their message, or not at all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync
from tenacity import wait_fixed

from rsmq import Broker, ConfigError, Message, Reject, Retry, RetryPolicy, Settings
from rsmq.consumer.settling import outputs as outputs_module
from rsmq.errors import BrokerUnavailable, TooLarge, TopicFull
from rsmq.heartbeat.circles import circle_through, targets_of
from rsmq.redis.scripts import SETTLE_OUTPUTS
from tests.contract.witness import ask, settled
from tests.patience import until

pytestmark = pytest.mark.usefixtures("no_task_left")

SOON = RetryPolicy(max_attempts=3, wait=wait_fixed(0.01))


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """A broker with a prefix of its own."""
    return Broker(replace(settings, preflight="warn", partitions=2))


async def stored(broker: Broker, topic: str = "out") -> list[dict[bytes, bytes]]:
    """The entries of a topic, partition by partition, in order."""
    found = await broker.topics.find(topic)
    entries = []
    for partition in () if found is None else found.numbers:
        for _, fields in await ask(broker, "XRANGE", broker.keys.stream(topic, partition), "-", "+"):
            entries.append(dict(zip(fields[::2], fields[1::2], strict=True)))
    return entries


async def payloads(broker: Broker, topic: str = "out") -> list[bytes]:
    """The payloads of a topic."""
    return [entry[b"data"] for entry in await stored(broker, topic)]


def styles() -> Any:
    """Ordering, distribution, batch and kind of function."""
    return pytest.mark.parametrize(
        ("options", "is_plain"),
        [
            ({}, False), ({"ordering": "none"}, False), ({"distribution": "shared"}, False), ({"batch": 10}, False),
            ({}, True), ({"batch": 10}, True), ({"distribution": "shared", "batch": 10}, False),
        ],
        ids=["key", "none", "shared", "batch", "thread", "thread-batch", "shared-batch"],
    )  # fmt: skip


def register(broker: Broker, options: dict[str, Any], is_plain: bool, work: Callable[[Message], str | None]) -> None:
    """A handler that publishes what `work` returns, and fails if that raises."""
    register = broker.handler("in", group="g", retry=SOON, **options)

    async def one(message: Message) -> None:
        result = work(message)
        await message.publish("out", "first", key="k", headers={"a": "b"})
        await message.publish("out", message.data.decode(), key="k")
        if result:
            raise Reject(result)

    def plain(message: Message) -> None:
        result = work(message)
        message.publish_sync("out", "first", key="k", headers={"a": "b"})
        message.publish_sync("out", message.data.decode(), key="k")
        if result:
            raise Reject(result)

    async def many(messages: list[Message]) -> list[BaseException | None]:
        outcomes = list[BaseException | None]()
        for message in messages:
            try:
                outcomes.append(await one(message))
            except Exception as error:
                outcomes.append(error)
        return outcomes

    def plain_many(messages: list[Message]) -> list[BaseException | None]:
        outcomes = list[BaseException | None]()
        for message in messages:
            try:
                outcomes.append(plain(message))
            except Exception as error:
                outcomes.append(error)
        return outcomes

    register((plain_many if is_plain else many) if "batch" in options else plain if is_plain else one)


@styles()
async def test_outputs_of_a_settled_message_are_stored_once(
    broker: Broker, options: dict[str, Any], is_plain: bool
) -> None:
    """Those of an attempt that fails, and of a message that is rejected, are not stored."""

    def work(message: Message) -> str | None:
        return "never" if message.data == b"bad" else None

    register(broker, options, is_plain, work)
    async with broker.running():
        for payload in ("1", "bad", "2"):
            await broker.publish("in", payload, key="k")
        await settled(broker, "in")
        found = await stored(broker)
    assert sorted(entry[b"data"] for entry in found) == [b"1", b"2", b"first", b"first"]
    assert {entry[b"key"] for entry in found} == {b"k"}
    assert sum(entry.get(b"h") == b'{"a":"b"}' for entry in found) == 2


async def test_outputs_of_a_failed_attempt_are_dropped(broker: Broker) -> None:
    """The attempt that succeeds publishes nothing, so nothing is stored; with key order the message waits here."""

    @broker.handler("in", group="g", retry=SOON)
    async def handle(message: Message) -> None:
        if message.attempt < 3:
            await message.publish("out", f"attempt {message.attempt}")
            raise Retry("again", after=timedelta(0))

    async with broker.running():
        await broker.publish("in", "x", key="k")
        await settled(broker, "in")
        assert await payloads(broker) == []


async def test_outputs_keep_the_order_of_their_inputs(broker: Broker) -> None:
    """Per key, with retries in between."""

    @broker.handler("in", group="g", retry=SOON)
    async def handle(message: Message) -> None:
        number = int(message.data)
        await message.publish("out", str(number), key="k")
        if number % 7 == 0 and message.attempt == 1:
            raise Retry("again", after=timedelta(0))

    async with broker.running():
        for number in range(60):
            await broker.publish("in", str(number), key="k")
        await settled(broker, "in")
        assert await payloads(broker) == [str(number).encode() for number in range(60)]


class LostReplies:
    """The script, whose answers get lost."""

    def __init__(self, times: int) -> None:
        self.left, self.calls, self.name = times, 0, SETTLE_OUTPUTS.name

    async def __call__(self, settler_ask: Any, keys: Any, args: Any) -> Any:
        """Execute it, then fail as if the connection had broken."""
        self.calls += 1
        reply = await settler_ask(SETTLE_OUTPUTS, keys, args)
        if self.left:
            self.left -= 1
            raise BrokerUnavailable("the answer is lost")
        return reply


@contextmanager
def answers_lost(broker: Broker, times: int) -> Iterator[LostReplies]:
    """The first answers to settlements with outputs get lost."""
    assert broker.worker is not None
    outputs = broker.worker.consumers[0].settler.outputs
    real, lossy = outputs._ask, LostReplies(times)

    async def ask_lossy(script: Any, keys: Any, args: Any) -> Any:
        return await lossy(real, keys, args) if script is SETTLE_OUTPUTS else await real(script, keys, args)

    outputs._ask = ask_lossy
    yield lossy


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_settlement_whose_answer_is_lost_stores_outputs_once(broker: Broker, distribution: str) -> None:
    """The call is sent again; XACK returns 0 then."""
    register(broker, {"distribution": distribution}, False, lambda _: None)
    async with broker.running():
        with answers_lost(broker, 3) as lossy:
            for payload in ("1", "2"):
                await broker.publish("in", payload, key="k")
            await settled(broker, "in")
            await until(lambda: lossy.calls >= 4, "it is sent again")
            assert await payloads(broker) == [b"first", b"1", b"first", b"2"]


async def test_cancelled_worker_settles_what_is_done_once(broker: Broker) -> None:
    """It is cancelled while the answer to the settlement is on its way. On its way out it does not settle again."""
    asked = asyncio.Event()
    register(broker, {}, False, lambda _: None)
    async with broker:
        with anyio.CancelScope() as scope:
            async with broker.running():
                assert broker.worker is not None
                outputs = broker.worker.consumers[0].settler.outputs
                real = outputs._ask

                async def ask_slowly(script: Any, keys: Any, args: Any) -> Any:
                    reply = await real(script, keys, args)
                    if script is SETTLE_OUTPUTS and not asked.is_set():
                        asked.set()
                        await anyio.sleep_forever()
                    return reply

                outputs._ask = ask_slowly
                await broker.publish("in", "1", key="k")
                await asked.wait()
                for task in asyncio.all_tasks():
                    if task.get_coro().__qualname__ == "Broker.running.<locals>.run":  # type: ignore[union-attr]
                        task.cancel()
                scope.cancel()
        assert await payloads(broker) == [b"first", b"1"]


async def test_message_that_lost_its_consumer_is_settled_with_its_outputs(broker: Broker) -> None:
    """XGROUP DELCONSUMER deletes what is pending. The owner knows that only it settles, so the outputs are due."""
    entered, go = asyncio.Event(), asyncio.Event()

    @broker.handler("in", group="g")
    async def handle(message: Message) -> None:
        await message.publish("out", "x")
        entered.set()
        await go.wait()

    async with broker.running():
        await broker.publish("in", "x", key="k")
        await entered.wait()
        assert broker.worker is not None
        for partition in range(2):
            stream = broker.keys.stream("in", partition)
            await ask(broker, "XGROUP", "DELCONSUMER", stream, "g", broker.worker.member)
        go.set()
        await until(lambda: broker.worker.consumers[0].stats["settled"] == 1, "it is settled")  # type: ignore[union-attr]
        assert await payloads(broker) == [b"x"]


async def test_full_target_delays_the_settlement_and_the_handler_does_not_run_again(broker: Broker) -> None:
    """The message waits, then its output is stored."""
    runs = list[str]()

    @broker.handler("in", group="g")
    async def handle(message: Message) -> None:
        runs.append(message.data.decode())
        await message.publish("out", message.data.decode(), key="k")

    async with broker.running():
        await broker.topics.ensure("out", 1)
        await ask(broker, "XGROUP", "CREATE", broker.keys.stream("out", 0), "slow", "0", "MKSTREAM")
        await broker.topics.change("out", max_length=2)
        for number in range(5):
            await broker.publish("in", str(number), key="k")
        await until(lambda: len(runs) == 5, "all are handled")
        lanes = broker.worker.consumers[0].lanes.values()  # type: ignore[union-attr]
        await until(lambda: any(lane.outgoing.is_full for lane in lanes), "the target is full")
        assert await payloads(broker) == [b"0", b"1"]
        assert not all(lane.is_readable for lane in lanes)
        await broker.topics.change("out", max_length=0)
        await settled(broker, "in")
        assert await payloads(broker) == [b"0", b"1", b"2", b"3", b"4"]
        assert runs == ["0", "1", "2", "3", "4"]


async def test_worker_that_stops_while_a_target_is_full_hands_its_messages_back(settings: Settings) -> None:
    """The handler runs again at the next worker, as its first attempt. The output is stored once."""
    seen = list[tuple[str, int]]()

    def make() -> Broker:
        broker = Broker(replace(settings, preflight="warn", partitions=1))

        @broker.handler("in", group="g")
        async def handle(message: Message) -> None:
            seen.append((message.data.decode(), message.attempt))
            await message.publish("out", message.data.decode(), key="k")

        return broker

    first, second = make(), make()
    async with first:
        await first.topics.ensure("out", 1)
        await ask(first, "XGROUP", "CREATE", first.keys.stream("out", 0), "slow", "0", "MKSTREAM")
        await first.topics.change("out", max_length=1)
        async with first.running():
            for number in range(2):
                await first.publish("in", str(number), key="k")
            await until(lambda: len(seen) == 2, "both are handled")
            lanes = list(first.worker.consumers[0].lanes.values())  # type: ignore[union-attr]
            await until(lambda: lanes[0].outgoing.is_full, "the target is full")
        await ask(first, "XTRIM", first.keys.stream("out", 0), "MAXLEN", "=", 0)
        async with second.running():
            await settled(second, "in")
        assert await payloads(first) == [b"1"]
        assert seen == [("0", 1), ("1", 1), ("1", 1)]


async def test_what_is_wrong_with_an_output_fails_in_the_handler(broker: Broker) -> None:
    """A payload over the limit, a name, an option, an output that never has room."""
    errors = list[type[Exception]]()

    @broker.handler("in", group="g")
    async def handle(message: Message) -> None:
        wrong: list[tuple[str, Any, dict[str, Any]]] = [
            ("out", "x" * 2_000_000, {}), ("a b", "x", {}), ("out", "x", {"delya": 1}),
            ("out", "x", {"wait_replicas": 1}), ("small", "x", {"key": "k"}), ("out", float("nan"), {}),
        ]  # fmt: skip
        await message.publish("small", "x", key="k")
        for topic, payload, options in wrong:
            try:
                await message.publish(topic, payload, **options)
            except Exception as error:
                errors.append(type(error))

    async with broker.running():
        await broker.topics.ensure("small", 1)
        await broker.topics.change("small", max_length=1)
        await broker.publish("in", "x")
        await settled(broker, "in")
        assert await payloads(broker, "small") == [b"x"]
        assert await payloads(broker) == []
    assert errors[:5] == [TooLarge, ConfigError, ConfigError, ConfigError, TopicFull]
    assert len(errors) == 6


async def test_publish_after_the_handler_has_ended_says_what_to_write(broker: Broker) -> None:
    """Also while a later attempt of the same message runs: its outputs are its own."""
    kept, go = list[Message](), asyncio.Event()

    @broker.handler("in", group="g", retry=SOON)
    async def handle(message: Message) -> None:
        kept.append(message)
        if message.attempt == 1:
            raise Retry("again", after=timedelta(0))
        await go.wait()

    async with broker.running():
        await broker.publish("in", "x", key="k")
        await until(lambda: len(kept) == 2, "the second attempt runs")
        with pytest.raises(ConfigError, match="or use broker"):
            await kept[0].publish("out", "late")
        go.set()
        await settled(broker, "in")
        with pytest.raises(ConfigError, match="or use broker"):
            await kept[1].publish("out", "late")
        assert await payloads(broker) == []


async def test_publish_of_the_wrong_kind_says_what_to_write(broker: Broker) -> None:
    """A plain function has `publish_sync`, an async one `publish`."""
    errors = list[str]()

    @broker.handler("in", group="plain")
    def plain(message: Message) -> None:
        try:
            message.publish("out", "x")
        except ConfigError as error:
            errors.append(str(error))

    @broker.handler("in", group="async")
    async def handle(message: Message) -> None:
        try:
            message.publish_sync("out", "x")
        except ConfigError as error:
            errors.append(str(error))

    async with broker.running():
        await broker.publish("in", "x")
        await settled(broker, "in")
    assert sorted("publish_sync(...)" in error for error in errors) == [False, True]
    assert any("await message.publish" in error for error in errors)


async def test_delayed_outputs_and_outputs_with_an_id(broker: Broker) -> None:
    """A given id is stored once within the window, also over two inputs; a delayed output is delivered when due."""
    seen = list[bytes]()

    @broker.handler("in", group="g")
    async def handle(message: Message) -> None:
        await message.publish("out", "once", message_id="the-id", key="k")
        await message.publish("later", message.data.decode(), delay=timedelta(milliseconds=50), key="k")
        await message.publish("later", "once", delay="50ms", message_id="one", key="k")

    @broker.handler("later", group="g")
    async def later(message: Message) -> None:
        seen.append(message.data)

    async with broker.running():
        for number in range(2):
            await broker.publish("in", str(number), key="k")
        await until(lambda: len(seen) == 3, "all are delivered")
        assert await broker.publish("out", "once", message_id="the-id", key="k") == "the-id"
        assert await payloads(broker) == [b"once"]
    assert sorted(seen) == [b"0", b"1", b"once"]


async def test_handler_that_loses_its_lease_publishes_nothing(broker: Broker) -> None:
    """The owner after it handles the message again, and publishes."""
    entered, go, runs = asyncio.Event(), asyncio.Event(), list[int]()

    @broker.handler("in", group="g", partitions=1)
    async def handle(message: Message) -> None:
        runs.append(message.fence)
        await message.publish("out", str(len(runs)))
        if len(runs) == 1:
            entered.set()
            with anyio.CancelScope(shield=True):
                await go.wait()

    async with broker.running():
        await broker.publish("in", "x")
        await entered.wait()
        await ask(broker, "HINCRBY", broker.keys.lease("in", 0, "g"), "epoch", 1)
        await ask(broker, "HSET", broker.keys.lease("in", 0, "g"), "owner", "", "until_ms", 0)
        go.set()
        await until(lambda: len(runs) == 2, "the next owner handles it")
        await settled(broker, "in")
        assert await payloads(broker) == [b"2"]


async def test_output_in_a_batch_beside_one_that_fails(broker: Broker) -> None:
    """An item that fails publishes nothing; those after it of its key are handled again."""
    calls = list[list[str]]()

    @broker.handler("in", group="g", batch=10, linger=timedelta(milliseconds=200), retry=SOON, partitions=1)
    async def handle(messages: list[Message]) -> list[Exception | None]:
        calls.append([message.data.decode() for message in messages])
        for message in messages:
            await message.publish("out", f"{message.data.decode()}-{message.attempt}", key="k")
        return [Retry("x", after=timedelta(0)) if m.data == b"1" and m.attempt == 1 else None for m in messages]

    async with broker.running():
        await broker.publish_many("in", ["0", "1", "2"], key=lambda _: "k")
        await settled(broker, "in")
        found = await payloads(broker)
    assert found == [b"0-1", b"1-2", b"2-1"]


@pytest.mark.parametrize("is_plain", [False, True])
async def test_return_values_of_a_batch_are_outputs_of_its_items(broker: Broker, is_plain: bool) -> None:
    """An error is the outcome of its item, also that of a payload which is too large."""

    def work(numbers: list[int]) -> list[Any]:
        return [None if n == 0 else Reject("one") if n == 1 else "x" * 2_000_000 if n == 2 else n for n in numbers]

    async def work_async(numbers: list[int]) -> list[Any]:
        return work(numbers)

    policy = RetryPolicy(max_attempts=1)
    broker.handler("in", group="g", batch=10, output="out", retry=policy)(work if is_plain else work_async)
    async with broker.running():
        await broker.publish_many("in", [0, 1, 2, 3], key=lambda _: "k")
        await settled(broker, "in")
        assert await payloads(broker) == [b"3"]
        letters = [each async for each in broker.dead_letters.iterate(await broker.topics.existing("in"), "g")]
    assert sorted(each.reason for each in letters) == ["failed", "rejected"]


async def test_process_handler_is_told_to_return_its_output() -> None:
    """Its message has left the process of the worker."""
    import pickle

    from rsmq.model.message import MessageOrigin

    message = pickle.loads(pickle.dumps(Message(MessageOrigin("t", 0, "g"), b"1-0", [b"data", b"x"])))
    with pytest.raises(ConfigError, match="output='invoices'"):
        await message.publish("out", "x")
    assert await run_sync(lambda: message.fence) == 0


@pytest.mark.parametrize("partitions", [1, 2])
async def test_outputs_into_the_own_full_topic_go_on(settings: Settings, partitions: int) -> None:
    """Each message makes room for the step that follows it: all would wait for each other for ever."""
    broker, hops = Broker(replace(settings, preflight="warn", partitions=partitions, max_length=5)), list[int]()

    @broker.handler("work", group="g", concurrency=4)
    async def work(order: dict[str, int], message: Message) -> None:
        hops.append(order["hop"])
        if order["hop"] < 3:
            await message.publish("work", {"hop": order["hop"] + 1}, key=f"{message.key}+")

    async with broker:
        stored = 0
        while True:
            try:
                await broker.publish("work", {"hop": 0}, key=f"k{stored}")
            except TopicFull:
                break
            stored += 1
        async with broker.running():
            await until(lambda: hops.count(3) == stored, "all steps are handled")
    assert [hops.count(hop) for hop in range(4)] == [stored] * 4


@pytest.mark.parametrize("topics", [2, 3])
async def test_full_topics_that_publish_into_each_other_go_on(
    settings: Settings, topics: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each waits for room that only the next one can make. The circle is found, named, and every step is handled."""
    monkeypatch.setattr(outputs_module, "STANDING", 0.2)
    given = replace(settings, preflight="warn", partitions=1, max_length=5, lease_ttl=timedelta(seconds=1))
    broker, steps = Broker(given), Counter[int]()
    names = [f"step{number}" for number in range(topics)]

    def serve(number: int) -> None:
        @broker.handler(names[number], group="g")
        async def work(left: int, message: Message) -> None:
            steps[left] += 1
            if left:
                await message.publish(names[(number + 1) % topics], left - 1, key=message.key)

    async with broker:
        for number, name in enumerate(names):
            serve(number)
            for at in range(5):
                await broker.publish(name, 4, key=f"{name}{at}")
        async with broker.running():
            await until(lambda: steps[0] == 5 * topics, "all steps are handled")
            longest = max([await broker.client.execute_command("XLEN", broker.keys.stream(name, 0)) for name in names])
    assert steps == dict.fromkeys(range(5), 5 * topics)
    assert longest <= 10, "twice the limit"
    assert "topics wait for each other in a circle" in caplog.text


async def test_a_circle_is_a_way_back() -> None:
    """A chain of full topics is none: it ends where nothing waits."""
    assert circle_through("a", {"a": ["b"], "b": ["c"], "c": ["a", "d"]}) == ["a", "b", "c"]
    assert circle_through("a", {"a": ["b"], "b": ["c"], "c": ["b"]}) == []
    assert circle_through("a", {"a": ["b"], "b": ["c"]}) == []
    assert targets_of({"outputs_wait_for": "a"}) == targets_of({"outputs_wait_for": [1]}) == []
