"""Messages that fail for good become dead letters and do not affect other messages: promise 6."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import anyio
import pytest
from tenacity import wait_fixed

from rsmq import Broker, BrokerError, Message, NotJson, Reject, Retry, RetryPolicy
from tests.contract.witness import Witness, add, ask, dead, dies, lanes, letters_of, patient, settled
from tests.matrix.way import steady_connections
from tests.patience import until

QUICK = RetryPolicy(max_attempts=3, wait=wait_fixed(0.02))
HIGHEST = 2**64 - 1


@pytest.mark.parametrize("ordering", ["key", "none"])
async def test_a_failing_message_becomes_a_dead_letter_after_max_attempts(
    broker: Broker, witness: Witness, ordering: Any
) -> None:
    """A message that always fails is tried max_attempts times and then kept with its reason; the others are done."""

    @broker.handler("t", group="g", retry=QUICK, ordering=ordering)
    async def handle(order: dict[str, int], message: Message) -> None:
        if order["n"] == 3:
            tries.append(message.attempt)
            raise ValueError("never")
        witness.note(order["n"])

    tries: list[int] = []
    async with broker.running():
        for n in range(10):
            await broker.publish("t", {"n": n}, key="k", headers={"from": "test"})
        await witness.sees(n for n in range(10) if n != 3)
        await dies(broker, "t", "g", 1)
        await settled(broker, "t")
        (letter,) = await letters_of(broker, "t", "g")
    assert tries == [1, 2, 3]
    assert (letter.reason, letter.error, letter.attempts) == ("failed", "ValueError: never", 3)
    assert (letter.data, letter.key, letter.headers) == (b'{"n":3}', "k", {"from": "test"})
    assert (letter.topic, letter.group) == ("t", "g")


async def test_a_handler_rejects_or_delays_its_retry(broker: Broker, witness: Witness) -> None:
    """Reject is final, Retry(after=...) waits that long, and what the policy does not retry is final too."""
    times: list[float] = []

    def is_worth_it(error: BaseException) -> bool:
        return not isinstance(error, KeyError)

    @broker.handler("t", group="g", retry=RetryPolicy(max_attempts=9, retry_on=is_worth_it))
    async def handle(order: dict[str, str]) -> None:
        match order["do"]:
            case "reject":
                raise Reject("no such customer")
            case "refuse":
                raise KeyError("final")
            case "later":
                times.append(time.monotonic())
                if len(times) < 3:
                    raise Retry("not open yet", after=timedelta(milliseconds=150))
        witness.note(order["do"])

    async with broker.running():
        for do in ("reject", "refuse", "later", "work"):
            await broker.publish("t", {"do": do})
        await witness.sees(["later", "work"])
        letters = await dies(broker, "t", "g", 2)
        await settled(broker, "t")
    assert sorted(reason for reason, _ in letters) == ["failed", "rejected"]
    assert len(times) == 3
    assert all(later - sooner >= 0.15 for sooner, later in pairwise(times))


@pytest.mark.parametrize("form", ["key", "none", "batch"])
async def test_a_retry_that_does_not_count_is_no_attempt(broker: Broker, form: str) -> None:
    """However often the handler asks for it, the attempts are left for real failures."""
    tries: list[tuple[int, bool]] = []

    def judge(message: Message) -> Exception | None:
        tries.append((message.attempt, message.is_last_attempt))
        return Retry("too early", after="10ms", counts=False) if len(tries) in (1, 2, 3, 5, 6) else ValueError("x")

    if form == "batch":

        @broker.handler("t", group="g", retry=QUICK, batch=5)
        async def handle_many(messages: list[Message]) -> list[Exception | None]:
            return [judge(message) for message in messages]
    else:

        @broker.handler("t", group="g", retry=QUICK, ordering="key" if form == "key" else "none")
        async def handle(message: Message) -> None:
            error = judge(message)
            assert error is not None
            raise error

    async with broker.running():
        await broker.publish("t", {"n": 1}, key="k")
        await dies(broker, "t", "g", 1)
        await settled(broker, "t")
        (letter,) = await letters_of(broker, "t", "g")
    assert [attempt for attempt, _ in tries] == [1, 1, 1, 1, 2, 2, 2, 3]
    assert [is_last for _, is_last in tries] == [False] * 7 + [True]
    assert (letter.reason, letter.attempts) == ("failed", 3)


async def test_a_timeout_is_a_failure(broker: Broker) -> None:
    """A message whose handler never ends becomes a dead letter with reason timeout."""

    @broker.handler("t", group="g", retry=QUICK, timeout=timedelta(milliseconds=100))
    async def handle(_order: dict[str, int]) -> None:
        await anyio.sleep_forever()

    async with broker.running():
        await broker.publish("t", {"n": 1})
        assert await dies(broker, "t", "g", 1) == [("timeout", b'{"n":1}')]
        await settled(broker, "t")


async def test_a_batch_handler_settles_each_item_separately(broker: Broker, witness: Witness) -> None:
    """The good items of a batch are settled, the bad ones retried or dead-lettered, separately."""
    tries: list[tuple[int, int]] = []

    @broker.handler("t", group="g", batch=10, linger=timedelta(milliseconds=200), retry=QUICK, ordering="none")
    async def handle(orders: list[dict[str, int]], messages: list[Message]) -> list[Exception | None]:
        outcomes: list[Exception | None] = []
        for order, message in zip(orders, messages, strict=True):
            n = order["n"]
            tries.append((n, message.attempt))
            outcomes.append({1: Retry(), 2: Reject("bad"), 3: ValueError("x") if message.attempt < 2 else None}.get(n))
            if outcomes[-1] is None:
                witness.note(n)
        return outcomes

    async with broker:
        await broker.publish_many("t", [{"n": n} for n in range(10)])
        async with broker.running():
            await witness.sees({0, 3, 4, 5, 6, 7, 8, 9})
            letters = await dies(broker, "t", "g", 2)
            await settled(broker, "t")
    assert sorted(letters) == [("failed", b'{"n":1}'), ("rejected", b'{"n":2}')]
    assert [attempt for n, attempt in tries if n == 1] == [1, 2, 3]
    assert [attempt for n, attempt in tries if n == 3] == [1, 2]
    assert len(tries) == 10 + 2 + 1


@pytest.mark.parametrize("ordering", ["key", "none"])
async def test_a_batch_that_raises_fails_each_of_its_items(broker: Broker, witness: Witness, ordering: Any) -> None:
    """An exception of the handler fails all items of the batch: they are retried and handled in the end."""
    calls: list[int] = []

    @broker.handler("t", group="g", batch=50, linger=timedelta(milliseconds=100), retry=QUICK, ordering=ordering)
    async def handle(orders: list[dict[str, int]]) -> None:
        calls.append(len(orders))
        if len(calls) == 1:
            raise ConnectionError("the database is away")
        for order in orders:
            witness.note(order["n"])

    async with broker:
        await broker.publish_many("t", [{"n": n} for n in range(30)], key=lambda order: f"k{order['n'] % 4}")
        async with broker.running():
            await witness.sees(range(30))
            await settled(broker, "t")
            assert await dead(broker, "t", "g") == []


BAD = {
    "no data": [b"foo", b"bar"],
    "invalid UTF-8": [b"data", b'{"n": "\xff\xfe"}'],
    "not JSON": [b"data", b"{"],
    "another type": [b"data", b"[1]"],
    "broken headers": [b"data", b'{"n":1}', b"h", b"{not json"],
    "headers of numbers": [b"data", b'{"n":1}', b"h", b'{"a":1}'],
    "10 000 fields": [part for n in range(10_000) for part in (b"f%d" % n, b"x")],
    "10 000 fields with data": [b"data", b'{"n":1}', *[p for n in range(10_000) for p in (b"f%d" % n, b"x")]],
    "depth bomb": [b"data", b"[" * 100_000],
    "depth bomb in an object": [b"data", b'{"n":' * 50_000 + b"1" + b"}" * 50_000],
    "depth bomb in headers": [b"data", b'{"n":1}', b"h", b"[" * 100_000],
    "duplicate fields": [b"data", b'{"n":1}', b"data", b'{"n":2}'],
    "endless number": [b"data", b'{"n":' + b"9" * 100_000 + b"}"],
    "empty": [b"data", b""],
}


@pytest.mark.parametrize("batch", [None, 100], ids=["one by one", "in batches"])
async def test_what_cannot_be_read_is_isolated(broker: Broker, witness: Witness, batch: int | None) -> None:
    """Unreadable entries of other clients become dead letters; the messages around them are handled one time."""
    if batch is None:

        @broker.handler("t", group="g", partitions=1)
        async def handle(order: dict[str, Any]) -> None:
            witness.note(order["n"])

    else:

        @broker.handler("t", group="g", partitions=1, batch=batch, linger=timedelta(milliseconds=20))
        async def handle_all(orders: list[dict[str, Any]]) -> None:
            for order in orders:
                witness.note(order["n"])

    async with broker:
        await patient(broker.topics.ensure)("t", 1)
        stream = broker.keys.stream("t", 0)
        for n, fields in enumerate(BAD.values()):
            await broker.publish("t", {"n": f"mate {n}"}, key="k")
            await add(broker, stream, *fields)
        async with broker.running():
            await witness.sees(f"mate {n}" for n in range(len(BAD)))
            letters = await dies(broker, "t", "g", len(BAD))
            await broker.publish("t", {"n": "after"})
            await witness.sees(["after"])
            await settled(broker, "t")
    assert {reason for reason, _ in letters} == {"malformed"}
    assert len(witness.seen) == len(BAD) + 1
    assert [data for _, data in letters if data == b"{"] == [b"{"], "the original is kept"


async def test_odd_entries_that_can_be_read_are_handled(broker: Broker) -> None:
    """Any client may publish: only `data` is needed, unknown fields become headers, invalid bytes are escaped."""
    got: list[Message] = []

    @broker.handler("t", group="g", partitions=1)
    async def handle(_data: bytes, message: Message) -> None:
        got.append(message)

    async with broker.running():
        stream = broker.keys.stream("t", 0)
        await add(broker, stream, "data", b"\xff", at="1-7")
        await add(broker, stream, "key", b"\xfe", "shop", "7", "data", "x", "id", b"\xfd", at="1-8")
        await until(lambda: len(got) == 2, "both come")
        await settled(broker, "t")
    assert (got[0].data, got[0].key, got[0].id, got[0].headers) == (b"\xff", None, "1-7", {})
    assert (got[1].key, got[1].id, got[1].headers) == ("\\xfe", "\\xfd", {"shop": "7"})


def crash(order: dict[str, int]) -> None:
    """A handler at module level, so that another process can import it."""
    if order["n"] == 1:
        os._exit(3)


@steady_connections
async def test_a_crash_in_a_process_of_its_own_is_a_failure(broker: Broker) -> None:
    """execution="process": the crash ends the process of the handler, not the member."""
    broker.handler("t", group="g", execution="process", concurrency=1, retry=QUICK)(crash)
    async with broker.running():
        await broker.publish_many("t", [{"n": n} for n in range(4)])
        assert [data for _, data in await dies(broker, "t", "g", 1)] == [b'{"n":1}']
        await settled(broker, "t")
        assert lanes(broker)


async def test_a_replayed_dead_letter_goes_to_its_group(broker: Broker, witness: Witness) -> None:
    """A replay delivers the message only to the group that had failed."""
    is_mended = anyio.Event()

    @broker.handler("t", group="g", retry=QUICK)
    async def handle(order: dict[str, int]) -> None:
        if not is_mended.is_set():
            raise ValueError("broken")
        witness.note(("g", order["n"]))

    @broker.handler("t", group="other")
    async def other(order: dict[str, int]) -> None:
        witness.note(("other", order["n"]))

    async with broker.running():
        await broker.publish_many("t", [{"n": n} for n in range(5)])
        await dies(broker, "t", "g", 5)
        is_mended.set()
        found = await patient(broker.topics.find)("t")
        assert found is not None
        replay = patient(broker.dead_letters.replay)
        replayed = await replay(found, "g")
        assert replayed == 5 or replay.statistics["attempt_number"] > 1, (
            "the rest was replayed before an answer was lost"
        )
        await witness.sees([(group, n) for group in ("g", "other") for n in range(5)])
        await settled(broker, "t")
        assert await dead(broker, "t", "g") == []
    assert len(witness.seen) == 10


async def test_a_key_of_a_wrong_type_does_not_end_the_worker(
    make_broker: Callable[..., Broker], witness: Witness
) -> None:
    """The dead-letter key has another type: the worker runs on and buries the message when the key is deleted."""
    broker = make_broker()

    @broker.handler("t", group="g", partitions=1, concurrency=2)
    async def handle(order: dict[str, int]) -> None:
        if order["n"] == 0:
            raise Reject("no")
        witness.note(order["n"])

    async with broker.running():
        key = broker.keys.dlq("t", 0, "g")
        await ask(broker, "SET", key, "foreign")
        for n in range(20):
            await broker.publish("t", {"n": n})
        await add(broker, broker.keys.stream("t", 0), "no", "data")
        await witness.sees(range(1, 20))
        await ask(broker, "DEL", key)
        letters = await dies(broker, "t", "g", 2)
        await settled(broker, "t")
    assert sorted(reason for reason, _ in letters) == ["malformed", "rejected"]


@steady_connections
async def test_a_foreign_entry_with_the_highest_id_is_handled_and_the_error_says_how_to_go_on(
    make_broker: Callable[..., Broker], witness: Witness
) -> None:
    """The server adds nothing behind it. Without its key, the partition begins anew."""
    broker = make_broker()

    @broker.handler("t", group="g", partitions=1)
    async def handle(order: dict[str, int]) -> None:
        witness.note(order["n"])

    async with broker.running():
        stream = broker.keys.stream("t", 0)
        await add(broker, stream, "data", '{"n": 1}', at=f"{HIGHEST}-{HIGHEST}")
        await witness.sees([1])
        with pytest.raises(BrokerError, match=r"never delete this key\. Else another program has written"):
            await broker.publish("t", {"n": 2})
        await settled(broker, "t")
        await ask(broker, "DEL", stream)
        await broker.publish("t", {"n": 3})
        await witness.sees([3])


async def test_a_handler_that_swallows_its_cancellation_is_asked_again(broker: Broker, witness: Witness) -> None:
    """The timeout cancels the handler again until it ends."""
    refusals = 0

    @broker.handler("t", group="g", timeout=timedelta(milliseconds=100), retry=RetryPolicy(max_attempts=1))
    async def handle(order: dict[str, int]) -> None:
        nonlocal refusals
        while order["n"] == 0:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                refusals += 1
                if refusals == 3:
                    raise
        witness.note(order["n"])

    async with broker.running():
        await broker.publish_many("t", [{"n": n} for n in range(5)])
        await witness.sees(range(1, 5))
        assert await dies(broker, "t", "g", 1) == [("timeout", b'{"n":0}')]
    assert refusals == 3


def nested(levels: int) -> Any:
    """Objects and arrays within each other, in turn."""
    value: Any = 1
    for level in range(levels):
        value = {"in": value} if level % 2 else [value]
    return value


async def test_depth_that_no_reader_takes_is_refused_wherever_a_payload_is_published(
    broker: Broker, witness: Witness
) -> None:
    """200 levels are handled. One more was stored, and became a dead letter."""

    @broker.handler("t", group="g", retry=QUICK)
    async def handle(payload: Any, message: Message) -> None:
        for publish in (message.publish, broker.publish):
            with pytest.raises(NotJson, match="more than 200 levels"):
                await publish("t", nested(201))
        assert payload == nested(200)
        witness.note("200 levels")

    @broker.handler("steps", group="g", retry=QUICK)
    async def keep(_: Any, message: Message) -> Any:
        witness.note(message.attempt)
        with pytest.raises(NotJson, match="more than 200 levels"):
            async with message.step("one") as step:
                step.result = nested(201)
        return nested(201)

    async with broker.running():
        for refused in (
            partial(broker.publish, "t"),
            partial(broker.publish, "t", delay=timedelta(hours=1)),
            partial(broker.publish, "t", message_id="one", unique="one"),
            lambda payload: broker.publish_many("t", [payload]),
            partial(broker.request, "t", timeout=timedelta(minutes=1)),
            partial(broker.send, "device", topic="alerts"),
            partial(broker.schedules.upsert, "often", timedelta(hours=1), "t"),
        ):
            with pytest.raises(NotJson, match="more than 200 levels"):
                await refused(nested(201))
        await broker.publish("t", nested(200))
        await broker.publish("steps", 1, keep_result=timedelta(minutes=1))
        await witness.sees(["200 levels", 1, 2, 3])
        assert (await dies(broker, "steps", "g", 1)) == [("failed", b"1")]
        await settled(broker, "t")
        assert not await letters_of(broker, "t", "g")
