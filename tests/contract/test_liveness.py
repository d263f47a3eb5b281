"""A slow handler is not treated as dead: promise 5. Tests with killed processes are in tests/chaos."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import anyio
import pytest

from rsmq import Broker
from tests.contract.witness import Witness, ask, settled
from tests.patience import until

SHORT = {"lease_ttl": timedelta(seconds=1), "block": timedelta(milliseconds=300)}


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_a_slow_handler_keeps_its_messages(
    make_broker: Callable[..., Broker], witness: Witness, distribution: Literal["hash", "shared"]
) -> None:
    """Handlers that run for three leases, in two members: each message is handled one time."""

    def member() -> Broker:
        broker = make_broker(**SHORT)

        @broker.handler("t", group="g", distribution=distribution, concurrency=100)
        async def handle(order: dict[str, int]) -> None:
            began.append(order["n"])
            await anyio.sleep(3)  # that it is slow is the thing under test
            witness.note(order["n"])

        return broker

    began: list[int] = []
    async with member().running() as first, member().running():
        await first.publish_many("t", [{"n": n} for n in range(20)])
        await witness.sees(range(20))
        await settled(first, "t")
    assert sorted(began) == list(range(20))


async def test_a_slow_thread_keeps_its_message(make_broker: Callable[..., Broker], witness: Witness) -> None:
    """The same for a plain function in a thread."""

    def member() -> Broker:
        broker = make_broker(**SHORT)

        @broker.handler("t", group="g")
        def handle(order: dict[str, int]) -> None:
            began.append(order["n"])
            threading.Event().wait(2.5)  # that it is slow is the thing under test
            witness.note(order["n"])

        return broker

    began: list[int] = []
    async with member().running() as first, member().running():
        await first.publish_many("t", [{"n": n} for n in range(4)])
        await witness.sees(range(4))
        await settled(first, "t")
    assert sorted(began) == list(range(4))


async def test_a_member_that_only_loses_its_presence_keeps_its_work(
    make_broker: Callable[..., Broker], witness: Witness
) -> None:
    """Its subscription is closed many times: it subscribes again before other members declare it dead."""

    def member() -> Broker:
        broker = make_broker()

        @broker.handler("t", group="g")
        async def handle(order: dict[str, int]) -> None:
            await anyio.sleep(0.5)
            witness.note(order["n"])

        return broker

    async with member().running() as first, member().running() as second:
        for n in range(30):
            await first.publish("t", {"n": n})
        for _ in range(5):
            for broker in (first, second):
                assert broker.worker is not None
                for row in (await ask(first, "CLIENT", "LIST", "TYPE", "pubsub")).splitlines():
                    address = dict(word.split(b"=", 1) for word in row.split(b" "))[b"id"]
                    await ask(first, "CLIENT", "KILL", "ID", address)
            await anyio.sleep(0.1)
        await witness.sees(range(30))
        await settled(first, "t")
    assert len(witness.seen) == 30


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
