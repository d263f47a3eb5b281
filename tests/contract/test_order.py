"""Messages with the same key are handled in publish order, one at a time: promise 4."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta

import anyio
import pytest
from tenacity import wait_fixed

from rsmq import Broker, Message, Reject, Retry, RetryPolicy
from tests.contract.witness import Witness, dead, dies, lanes, patient, settled
from tests.patience import until

QUICK = RetryPolicy(max_attempts=1000, wait=wait_fixed(0.02))


def distinct(seen: list[tuple[str, int]]) -> dict[str, list[int]]:
    """The numbers of each key in the order of their first success."""
    rows: dict[str, list[int]] = defaultdict(list)
    for key, n in seen:
        if n not in rows[key]:
            rows[key].append(n)
    return rows


async def test_messages_of_a_key_are_handled_in_order(broker: Broker, witness: Witness) -> None:
    """Forty keys run concurrently; messages of one key are handled in order, one at a time."""
    running: set[str | None] = set()
    most = 0

    @broker.handler("t", group="g")
    async def handle(order: dict[str, int], message: Message) -> None:
        nonlocal most
        assert message.key not in running, "two of one key at once"
        running.add(message.key)
        most = max(most, len(running))
        await asyncio.sleep(0.0005 * (order["n"] % 3))
        running.discard(message.key)
        witness.note((message.key, order["n"]))

    async with broker.running():
        items = [(f"k{n % 40}", n) for n in range(800)]
        await broker.publish_many("t", [{"n": n} for _, n in items], key=lambda order: f"k{order['n'] % 40}")
        await witness.sees(items)
        await settled(broker, "t")
    assert all(row == sorted(row) for row in distinct(witness.seen).values())
    assert most > 5, "keys wait for each other"


async def test_order_holds_across_retries_and_other_keys_go_on(broker: Broker, witness: Witness) -> None:
    """While one message of a key fails, the later ones of its key wait, and another key is handled."""
    others = anyio.Event()

    @broker.handler("t", group="g", retry=QUICK, partitions=1)
    async def handle(order: dict[str, int], message: Message) -> None:
        if message.key == "stuck" and order["n"] == 2 and not others.is_set():
            raise ValueError("not yet")
        witness.note((message.key, order["n"]))
        if (message.key, order["n"]) == ("free", 9):
            others.set()

    async with broker.running():
        for n in range(10):
            await broker.publish("t", {"n": n}, key="stuck")
        for n in range(10):
            await broker.publish("t", {"n": n}, key="free")
        await witness.sees([(key, n) for key in ("stuck", "free") for n in range(10)])
        await settled(broker, "t")
    assert distinct(witness.seen) == {"stuck": list(range(10)), "free": list(range(10))}
    assert witness.seen.index(("free", 9)) < witness.seen.index(("stuck", 2))


async def test_without_order_a_failing_message_does_not_block_its_key(broker: Broker, witness: Witness) -> None:
    """ordering="none": the failing message is handled after the others of its key."""
    others = anyio.Event()

    @broker.handler("t", group="g", ordering="none", retry=QUICK)
    async def handle(order: dict[str, int]) -> None:
        if order["n"] == 0 and not others.is_set():
            raise ValueError("not yet")
        witness.note(order["n"])
        if order["n"] == 9:
            others.set()

    async with broker.running():
        for n in range(10):
            await broker.publish("t", {"n": n}, key="k")
        await witness.sees(range(10))
        await settled(broker, "t")
    assert witness.seen[-1] == 0


async def test_order_holds_while_members_come_and_go(make_broker: Callable[..., Broker], witness: Witness) -> None:
    """Partitions move between three members under load: no repeat, no disorder."""
    last: dict[str | None, int] = {}

    def member() -> Broker:
        broker = make_broker()

        @broker.handler("t", group="g")
        async def handle(order: dict[str, int], message: Message) -> None:
            await asyncio.sleep(0.001)
            assert last.get(message.key, -1) < order["n"], "out of order"
            last[message.key] = order["n"]
            witness.note((message.key, order["n"]))

        return broker

    first, sent = member(), []
    async with first.running():

        async def publish(count: int) -> None:
            start = len(sent)
            for n in range(start, start + count):
                sent.append((f"k{n % 30}", n))
                await first.publish("t", {"n": n}, key=f"k{n % 30}")

        await publish(100)
        second, third = member(), member()
        async with second.running():
            await publish(100)
            async with third.running():
                await until(lambda: lanes(first) and lanes(second) and lanes(third), "all three have work")
                await publish(200)
            await publish(100)
        await publish(100)
        await witness.sees(sent)
        await settled(first, "t")
    assert len(witness.seen) == len(sent)


async def test_order_of_a_key_holds_in_a_batch_with_a_failure(broker: Broker, witness: Witness) -> None:
    """Messages behind a failed item of their key are handled again after it."""
    failed: set[tuple[str, int]] = set()

    @broker.handler("t", group="g", batch=20, linger=timedelta(milliseconds=50), retry=QUICK)
    async def handle(orders: list[dict[str, int]], messages: list[Message]) -> list[Exception | None]:
        outcomes: list[Exception | None] = []
        broken: set[str | None] = set()
        for order, message in zip(orders, messages, strict=True):
            name = (str(message.key), order["n"])
            if order["n"] % 4 == 1 and name not in failed:
                failed.add(name)
                broken.add(message.key)
                outcomes.append(Retry())
            else:
                if message.key not in broken:
                    witness.note(name)
                outcomes.append(None)
        return outcomes

    async with broker:
        names = [(f"k{n % 3}", n // 3) for n in range(60)]
        for key, n in names:
            await broker.publish("t", {"n": n}, key=key)
        async with broker.running():
            await witness.sees(names)
            await settled(broker, "t")
    assert distinct(witness.seen) == {f"k{key}": list(range(20)) for key in range(3)}


async def test_order_holds_across_a_stop(make_broker: Callable[..., Broker], witness: Witness) -> None:
    """A worker stops while a key waits for its retry: the next worker starts with the failed message."""
    gate = anyio.Event()

    def member() -> Broker:
        broker = make_broker()

        @broker.handler("t", group="g", retry=QUICK)
        async def handle(order: dict[str, int], message: Message) -> None:
            if order["n"] == 1 and not gate.is_set():
                witness.note(("failed", message.attempt))
                raise ValueError("not yet")
            witness.note((message.key, order["n"]))

        return broker

    first = member()
    async with first.running():
        for n in range(5):
            await first.publish("t", {"n": n}, key="k")
        await witness.sees([("k", 0), ("failed", 3)])
    gate.set()
    async with member().running() as second:
        await witness.sees([("k", n) for n in range(5)])
        await settled(second, "t")
    assert [n for key, n in witness.seen if key == "k"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("key", ["", "ключ", "a b", "{x}", "k" * 1000])
async def test_any_text_is_a_key(broker: Broker, witness: Witness, key: str) -> None:
    """Also one that is empty, has braces, or is long."""

    @broker.handler("t", group="g")
    async def handle(order: dict[str, int], message: Message) -> None:
        witness.note((message.key, order["n"]))

    async with broker.running():
        for n in range(5):
            await broker.publish("t", {"n": n}, key=key)
        await witness.sees([(key, n) for n in range(5)])
    assert [n for _, n in witness.seen] == list(range(5))


@pytest.mark.parametrize("busy", ["running", "waiting for its retry"])
@pytest.mark.parametrize("batch", [None, 4])
async def test_replayed_dead_letters_come_after_what_was_published_before_the_replay(
    broker: Broker, witness: Witness, busy: str, batch: int | None
) -> None:
    """Their key is busy: they take their turn at the end, in their own order, and later messages come after them."""
    is_mended, go, running = anyio.Event(), anyio.Event(), set[int]()

    async def handle(order: dict[str, int]) -> None:
        n = order["n"]
        assert not running, "two of one key at once"
        if n < 2 and not is_mended.is_set():
            raise Reject("broken")
        if n == 2 and busy != "running" and not go.is_set():
            witness.note(("failed", 2))
            raise Retry("later")
        running.add(n)
        if n == 2:
            witness.note(("began", 2))
            await go.wait()
        running.discard(n)
        witness.note(("k", n))

    async def handle_batch(orders: list[dict[str, int]]) -> list[Exception | None]:
        outcomes: list[Exception | None] = []
        for order in orders:
            try:
                await handle(order)
                outcomes.append(None)
            except (Reject, Retry) as error:
                outcomes.append(error)
                if isinstance(error, Retry):  # what comes after it in the batch is handled again
                    return outcomes + [Retry("behind it")] * (len(orders) - len(outcomes))
        return outcomes

    broker.handler("t", group="g", retry=QUICK, partitions=1, batch=batch)(handle if batch is None else handle_batch)
    async with broker.running():
        await broker.publish_many("t", [{"n": n} for n in range(2)], key=lambda _: "k")
        await dies(broker, "t", "g", 2)
        is_mended.set()
        await broker.publish_many("t", [{"n": n} for n in range(2, 10)], key=lambda _: "k")
        await until(lambda: ("began" if busy == "running" else "failed", 2) in witness.seen, "the key is busy")
        found = await patient(broker.topics.find)("t")
        assert found is not None
        await patient(broker.dead_letters.replay)(found, "g")
        assert await dead(broker, "t", "g") == []
        await broker.publish_many("t", [{"n": n} for n in range(10, 13)], key=lambda _: "k")
        go.set()
        await witness.sees([("k", n) for n in range(13)])
        await settled(broker, "t")
    handled = [seen for seen in witness.seen if seen[0] == "k"]
    assert distinct(handled) == {"k": [*range(2, 10), 0, 1, *range(10, 13)]}
