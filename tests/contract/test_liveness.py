"""A slow handler is not treated as dead: promise 5. Tests with killed processes are in tests/chaos."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import anyio
import pytest

from rsmq import Broker
from tests.contract.witness import Witness, ask, settled
from tests.matrix.way import steady_connections
from tests.patience import until

PATIENCE = (1, 3, 9)
"""How many times longer leases and graces are. A process that gets no CPU for longer than its lease has lost it, as it
should. Only then the next one is tried."""


def lost(*brokers: Broker) -> int:
    """How many leases ran out in these members, or were taken from them."""
    workers = [broker.worker for broker in brokers]
    return sum(consumer.stats["lost"] for worker in workers if worker is not None for consumer in worker.consumers)


@steady_connections
@pytest.mark.parametrize(("is_thread", "distribution"), [(False, "hash"), (False, "shared"), (True, "hash")])
async def test_a_slow_handler_keeps_its_messages(
    make_broker: Callable[..., Broker], is_thread: bool, distribution: Literal["hash", "shared"]
) -> None:
    """Handlers that run for three leases, in two members: each message is handled one time."""
    for lease in PATIENCE:
        began, witness, topic = list[int](), Witness(), f"t{lease}"

        def member(lease: int = lease, topic: str = topic, began: list[int] = began, witness: Witness = witness) -> Any:
            broker = make_broker(lease_ttl=timedelta(seconds=lease), block=timedelta(milliseconds=300))
            register = broker.handler(topic, group="g", distribution=distribution, concurrency=100)

            async def handle(order: dict[str, int]) -> None:
                began.append(order["n"])
                await anyio.sleep(3 * lease)  # that it is slow is the thing under test
                witness.note(order["n"])

            def block(order: dict[str, int]) -> None:
                began.append(order["n"])
                threading.Event().wait(3 * lease)  # the same in a thread
                witness.note(order["n"])

            register(block if is_thread else handle)
            return broker.running()

        async with member() as first, member() as second:
            await first.publish_many(topic, [{"n": n} for n in range(20)])
            await witness.sees(range(20), again=True)
            await settled(first, topic)
            if not lost(first, second):
                break
    assert sorted(began) == list(range(20))


async def test_a_member_that_only_loses_its_presence_keeps_its_work(make_broker: Callable[..., Broker]) -> None:
    """Its subscription is closed many times: it subscribes again before other members declare it dead."""
    for patience in PATIENCE:
        witness, topic = Witness(), f"t{patience}"

        def member(patience: int = patience, topic: str = topic, witness: Witness = witness) -> Any:
            broker = make_broker(presence_grace=timedelta(seconds=patience))

            @broker.handler(topic, group="g")
            async def handle(order: dict[str, int]) -> None:
                await anyio.sleep(0.5)
                witness.note(order["n"])

            return broker.running()

        async with member() as first, member() as second:
            for n in range(30):
                await first.publish(topic, {"n": n})
            for _ in range(5):
                closed = await subscribers(first)
                for client_id in closed:
                    await ask(first, "CLIENT", "KILL", "ID", client_id)
                await until(partial(all_subscribe_again, first, closed), "they subscribe again")
            await witness.sees(range(30), again=True)
            await settled(first, topic)
            if not lost(first, second):
                break
    assert sorted(witness.seen) == list(range(30))


async def subscribers(broker: Broker) -> set[bytes]:
    """The ids of the connections with a subscription."""
    rows = (await ask(broker, "CLIENT", "LIST", "TYPE", "pubsub")).splitlines()
    return {dict(word.split(b"=", 1) for word in row.split(b" "))[b"id"] for row in rows}


async def all_subscribe_again(broker: Broker, closed: set[bytes]) -> bool:
    """Whether there are as many other subscriptions as were closed."""
    return len(await subscribers(broker) - closed) >= len(closed)


async def test_a_hung_handler_ends_by_its_timeout(broker: Broker, witness: Witness) -> None:
    """The timeout counts as a failed attempt, and the next attempt may succeed."""
    tries: list[int] = []

    @broker.handler("t", group="g", timeout=timedelta(milliseconds=200))
    async def handle(order: dict[str, int]) -> None:
        tries.append(order["n"])
        if len(tries) == 1:
            await anyio.sleep_forever()
        witness.note(order["n"])

    async with broker.running():
        await broker.publish("t", {"n": 1}, key="k")
        await until(lambda: tries, "it runs")
        await witness.sees([1])
        await settled(broker, "t")
    assert tries == [1, 1]
