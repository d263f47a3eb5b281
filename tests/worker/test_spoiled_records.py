"""A worker among records that another client has spoiled: it goes on with the others, and its log names them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
from tenacity import wait_fixed

from rsmq import Broker, Message, Rate, RetryPolicy, Settings
from rsmq.worker.retention import Retention
from tests.contract.witness import ask
from tests.patience import until
from tests.robustness.records import HASHES, SETS, STREAMS, STRINGS, ZSETS, spoilings

SOON = RetryPolicy(max_attempts=3, wait=wait_fixed(0.01))


async def test_worker_goes_on_beside_spoiled_records_and_names_them(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """A retry, a unique name, and the state of a rate: what is good is handled, each bad one is in the log."""
    broker, tried = Broker(replace(settings, preflight="warn", partitions=1)), list[str]()

    @broker.handler(
        "in", group="g", ordering="none", retry=SOON, rate=Rate(100, per=timedelta(hours=1), by=lambda message: "acme")
    )
    async def handle(payload: str, message: Message) -> None:
        tried.append(payload)
        if message.attempt == 1:
            raise ValueError("again")

    async with broker:
        await broker.publish("in", "first")
        keys = broker.keys
        await ask(broker, "ZADD", keys.retry("in", 0, "g"), "1", b"\xff no retry")
        await ask(broker, "SET", keys.rate("in", "g", "acme"), "no rate")
        await ask(broker, "HSET", keys.unique("in", 0), "taken", b"\xff", "swept", "no record")
        assert (await broker.publish("in", "second", unique="taken")).is_new
        async with broker.running():
            await until(lambda: sorted(tried) == ["first"] * 2 + ["second"] * 2, "each is tried twice")
        await Retention(broker.client, keys, broker.settings, broker.topics, []).forget_names("in", 0)
    for part in ("no retry", "begins anew", "the record of 'taken'", "the record of 'swept'"):
        assert part in caplog.text


async def test_worker_serves_its_other_topic_beside_spoiled_records(settings: Settings) -> None:
    """Every record of one topic and of what members share: none of its tasks ends, and its schedule goes on."""
    quick = {"block": timedelta(milliseconds=50), "presence_interval": timedelta(milliseconds=100)}
    broker, handled, ticks = (
        Broker(replace(settings, preflight="warn", partitions=2, **quick)),
        list[str](),
        list[str](),
    )

    @broker.handler("orders", group="billing")
    async def spoiled(payload: str) -> None:
        handled.append(payload)

    @broker.handler("others", group="billing")
    async def good(payload: str) -> None:
        handled.append(payload)

    @broker.every("1s", "ticks", name="clock")
    def tick() -> str:
        return "tick"

    @broker.handler("ticks", group="billing")
    async def ticked(payload: str) -> None:
        ticks.append(payload)

    async with broker, broker.running():
        await broker.publish("orders", "first")
        await until(lambda: handled == ["first"], "it is served")
        (entry, *_) = [
            each for n in range(2) for each in await ask(broker, "XRANGE", broker.keys.stream("orders", n), "-", "+")
        ]
        for kind in sorted(HASHES | SETS | ZSETS | STREAMS | STRINGS):
            for number, commands in enumerate(spoilings(broker.keys, kind, entry[0].decode())):
                for command in commands:
                    await ask(broker, *command)
                wanted = f"{kind} {number}"
                await broker.publish("others", wanted)
                await until(partial(handled.__contains__, wanted), f"it goes on beside {wanted}")
        seen = len(ticks)
        await until(lambda: len(ticks) > seen + 1, "the schedule goes on")
