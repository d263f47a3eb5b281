"""Outputs on a cluster: by an out-stream in the slot of their message, relayed once and in order."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import anyio
import pytest

from rsmq import Broker, ConfigError, Message, Reject, RetryPolicy
from rsmq.consumer.settling import outputs as settling
from rsmq.errors import TopicFull
from rsmq.inspector.doctor.facts import WaitingOutputs, waiting_outputs
from rsmq.inspector.retention_holds import retention_holds
from rsmq.producer import output as outputs
from rsmq.redis.streams import delete_group
from tests.contract.witness import ask, settled
from tests.patience import until

pytestmark = pytest.mark.usefixtures("no_task_left")

KEYS = [f"k{n}" for n in range(6)]


async def stored(broker: Broker, topic: str = "out") -> dict[str, list[int]]:
    """The payloads of a topic by key, in order."""
    found = await broker.topics.find(topic)
    by_key = defaultdict(list)
    for partition in () if found is None else found.numbers:
        for _, flat in await ask(broker, "XRANGE", broker.keys.stream(topic, partition), "-", "+"):
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            by_key[fields[b"key"].decode()].append(int(fields[b"data"]))
            assert not outputs.OUT_FIELDS & fields.keys()
    return dict(by_key)


def publishing(broker: Broker, **options: Any) -> Broker:
    """A handler with one output for each message."""

    register = broker.handler("in", group="g", partitions=4, **options)

    async def handle(message: Message) -> None:
        await message.publish("out", int(message.data), key=message.key)

    async def handle_batch(messages: list[Message]) -> None:
        for message in messages:
            await handle(message)

    register(handle_batch if "batch" in options else handle)
    return broker


async def waiting(broker: Broker) -> int:
    """Entries in the out-streams."""
    return sum([await ask(broker, "XLEN", broker.keys.out("in", partition, "g")) for partition in range(4)])


async def is_drained(broker: Broker) -> None:
    """Until everything is settled and relayed."""
    await settled(broker, "in")
    with anyio.fail_after(60):
        while await waiting(broker):
            await anyio.sleep(0.02)


@pytest.mark.parametrize("options", [{}, {"batch": 20}, {"distribution": "shared"}], ids=["key", "batch", "shared"])
async def test_outputs_reach_other_slots_once_and_in_order(
    make_broker: Callable[..., Broker], options: dict[str, Any]
) -> None:
    """Two workers; with key order the outputs of a key come in the order of their inputs."""
    first, second = (publishing(make_broker(), **options) for _ in range(2))
    async with first.running(), second.running():
        for number in range(120):
            await first.publish("in", number, key=KEYS[number % 6])
        await is_drained(first)
        found = await stored(first)
    if options.get("distribution") == "shared":
        found = {key: sorted(numbers) for key, numbers in found.items()}
    assert found == {key: list(range(at, 120, 6)) for at, key in enumerate(KEYS)}


async def test_next_owner_relays_what_is_left_behind_the_mark(make_broker: Callable[..., Broker]) -> None:
    """The last one died after it had relayed something, and before it deleted that."""
    broker = publishing(make_broker())
    async with broker:
        await broker.topics.ensure("in", 4)
        topic = await broker.topics.ensure("out", 1)
        out = broker.keys.out("in", 1, "g")
        ids = [
            await ask(
                broker, "XADD", out, "*", "data", str(n), "id", f"m{n}", "key", "k", "out.topic", topic.name,
                "out.partition", 0,
            )
            for n in range(4)
        ]  # fmt: skip
        ms, seq = ids[1].decode().split("-")
        await ask(broker, "HSET", broker.keys.jobs("out", 0), "out|in.1|g", f"{int(ms):020d}-{int(seq):020d}")
        async with broker.running():
            await is_drained(broker)
            assert await stored(broker) == {"k": [2, 3]}


async def test_delayed_outputs_and_outputs_with_an_id(make_broker: Callable[..., Broker]) -> None:
    """The window and the due time travel through the out-stream."""
    broker, seen = make_broker(), list[int]()

    @broker.handler("in", group="g", partitions=4)
    async def handle(number: int, message: Message) -> None:
        await message.publish("out", 1, message_id="the-id", key="k")
        await message.publish("later", number, delay=timedelta(milliseconds=50), key="k")

    @broker.handler("later", group="g", partitions=2)
    async def later(number: int) -> None:
        seen.append(number)

    async with broker.running():
        for number in range(2):
            await broker.publish("in", number, key="k")
        await until(lambda: len(seen) == 2, "both are delivered")
        await broker.publish("out", 1, message_id="the-id", key="k")
        assert await stored(broker) == {"k": [1]}


async def test_full_target_and_full_out_stream_delay_settlements(
    make_broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers run once; when there is room everything arrives in order."""
    monkeypatch.setattr(outputs, "OUT_LENGTH", 3)
    broker, runs = make_broker(), list[int]()

    @broker.handler("in", group="g", partitions=4)
    async def handle(number: int, message: Message) -> None:
        runs.append(number)
        await message.publish("out", number, key="k")

    async with broker.running():
        await broker.topics.ensure("out", 1)
        await ask(broker, "XGROUP", "CREATE", broker.keys.stream("out", 0), "slow", "0", "MKSTREAM")
        await broker.topics.change("out", max_length=2)
        for number in range(10):
            await broker.publish("in", number, key="k")
        lanes = broker.worker.consumers[0].lanes.values()  # type: ignore[union-attr]
        await until(lambda: any(lane.outgoing.is_full for lane in lanes), "the out-stream is full")
        assert await stored(broker) == {"k": [0, 1]}
        assert 0 < await waiting(broker) <= 3
        topic = await broker.topics.existing("in")
        found = list[WaitingOutputs]()

        async def is_counted() -> bool:  # what is settled meanwhile comes after what the relay has taken
            before = await waiting(broker)
            found[:] = await waiting_outputs(broker.client, broker.keys, [("in", "g", n) for n in range(4)])
            return before == sum(each.count for each in found) == await waiting(broker)

        await until(is_counted, "those that wait are counted")
        assert all(timedelta(0) <= each.age + timedelta(seconds=1) < timedelta(minutes=5) for each in found)
        holds = [hold for n in range(4) for hold in await retention_holds(broker.client, broker.keys, topic, n)]
        (why,) = (hold.why for hold in holds if hold.holder == "group g")
        assert re.search(r"outputs? waits? in its out-stream", why)
        with pytest.raises(ConfigError, match="out-streams of group 'g'"):
            await delete_group(broker.client, broker.keys, topic, "g")
        await broker.topics.change("out", max_length=0)
        await is_drained(broker)
        assert await stored(broker) == {"k": list(range(10))}
        assert runs == list(range(10))


async def test_what_failed_for_good_reaches_another_slot_once(make_broker: Callable[..., Broker]) -> None:
    """By the out-stream; the record of it is in the slot of the message that failed."""
    broker = make_broker()

    @broker.handler("in", group="g", partitions=4, retry=RetryPolicy(max_attempts=1), fallback="out")
    async def handle(_: Message) -> None:
        raise Reject("not here")

    async with broker.running():
        refs = [await broker.publish("in", number, key=KEYS[number % 6]) for number in range(60)]
        await is_drained(broker)
        found = await stored(broker)
        assert found == {key: list(range(at, 60, 6)) for at, key in enumerate(KEYS)}
        for ref in refs[:6]:
            status = (await broker.look(ref)).group("g")
            assert status is not None
            assert (status.state, status.to_topic) == ("handed_on", "out")
        assert not [letter async for letter in broker.dead_letters.iterate(await broker.topics.existing("in"), "g")]


async def test_full_topics_that_publish_into_each_other_go_on(
    make_broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their out-streams are full as well: each relay waits for room that only the other one can make."""
    monkeypatch.setattr(outputs, "OUT_LENGTH", 3)
    monkeypatch.setattr(settling, "STANDING", 0.2)
    broker = make_broker(partitions=1, max_length=5, lease_ttl=timedelta(seconds=1))
    handled = {left: set[str]() for left in range(7)}  # by id: a busy machine loses a lease of a second now and then

    def serve(name: str, target: str) -> None:
        @broker.handler(name, group="g")
        async def work(left: int, message: Message) -> None:
            handled[left].add(message.id)
            if left:
                await message.publish(target, left - 1, key=message.key)

    serve("ping", "pong")
    serve("pong", "ping")
    async with broker.running():
        stored, lengths = 0, set[int]()

        async def has_circle() -> bool:
            nonlocal stored
            for name in ("ping", "pong"):
                with suppress(TopicFull):
                    await broker.publish(name, 6, key=str(stored))
                    stored += 1
            return stored >= 2 * (5 + 3) and "topics wait for each other in a circle" in caplog.text

        async def are_handled() -> bool:
            lengths.update([await ask(broker, "XLEN", broker.keys.stream(name, 0)) for name in ("ping", "pong")])
            return len(handled[0]) == stored

        await until(has_circle, "all room is used, and they wait for each other")
        await until(are_handled, "all steps are handled")
    assert {left: len(ids) for left, ids in handled.items()} == dict.fromkeys(range(7), stored)
    assert max(lengths) <= 10, "twice the limit"
