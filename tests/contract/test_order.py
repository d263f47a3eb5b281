"""Messages with the same key are handled in publish order, one at a time: promise 4."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta

import anyio
import pytest
from tenacity import wait_fixed

from rsmq import Broker, Message, Retry, RetryPolicy
from tests.contract.witness import Witness, lanes, settled
from tests.patience import until

QUICK = RetryPolicy(max_attempts=1000, wait=wait_fixed(0.02))


def distinct(seen: list[tuple[str, int]]) -> dict[str, list[int]]:
    """The numbers of each key in the order of their first success."""
    rows: dict[str, list[int]] = defaultdict(list)
    for key, n in seen:
        if n not in rows[key]:
            rows[key].append(n)
    return rows


async def test_order_of_a_key(broker: Broker, witness: Witness) -> None:
    """Forty keys at once, each in order, never two of a key at the same time; keys do run beside each other."""
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
    """While one message of a key fails, the later ones of its key wait, and another key is handled to its end."""
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


async def test_without_order_a_failing_message_holds_up_nobody(broker: Broker, witness: Witness) -> None:
    """ordering="none": the message that fails comes back behind the others of its key."""
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


async def test_order_of_a_key_in_a_batch_with_a_failure(broker: Broker, witness: Witness) -> None:
    """What follows a failed item of its key is handled again after it, never before."""
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
    """A worker stops while a key waits for its retry: the next worker begins with the failed message."""
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
