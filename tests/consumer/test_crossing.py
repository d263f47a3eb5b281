"""A retry that is due before the reply to its parking is read."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from tenacity import wait_none

from rsmq import Broker, Message, Retry, RetryPolicy, Settings
from rsmq.consumer import reclaimer
from rsmq.consumer.settler import Settler
from rsmq.script import PARK_MESSAGE, UNPARK_MESSAGES
from tests.contract.witness import ask, settled


async def test_it_comes_back_before_it_is_known_to_be_parked(
    server_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unparker brings it while its parking still waits for the reply: it is handled again, not left pending."""
    broker, attempts = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1)), list[int]()
    run = Settler._run

    async def slow(settler: Settler, script: Any, lane: Any, *args: Any) -> bool:
        result = await run(settler, script, lane, *args)
        if script is PARK_MESSAGE:
            lane.retry_at = 0.0
            with anyio.move_on_after(20):
                while await ask(broker, "ZCARD", lane.retry_key):
                    await anyio.sleep(0.01)
        return result

    monkeypatch.setattr(Settler, "_run", slow)

    @broker.handler("orders", group="billing", retry=RetryPolicy(max_attempts=2, wait=wait_none()))
    async def bill(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise Retry("later")

    async with broker.running():
        await broker.publish("orders", {})
        await settled(broker, "orders")
    assert attempts == [1, 2]


async def test_what_waits_in_its_place_is_left_to_its_timer(
    server_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With key order the unparker sees at the same moment that a retry is due: it must not bring it a second time."""
    broker, attempts = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1)), list[int]()
    start, found = Settler.start, list[Any]()

    async def unpark(*args: Any) -> Any:
        reply = await UNPARK_MESSAGES(*args)
        found.extend(reply[2:])
        return reply

    async def start_late(settler: Settler, message: Message, lane: Any) -> bool:
        lane.retry_at = 0.0
        with anyio.fail_after(30):
            while await ask(broker, "ZCARD", lane.retry_key):
                await anyio.sleep(0.01)
        return await start(settler, message, lane)

    monkeypatch.setattr(reclaimer, "UNPARK_MESSAGES", unpark)
    monkeypatch.setattr(Settler, "start", start_late)

    @broker.handler("orders", group="billing", retry=RetryPolicy(max_attempts=3, wait=wait_none()))
    async def bill(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise Retry("later")

    async with broker.running():
        await broker.publish("orders", {}, key="one")
        await settled(broker, "orders")
    assert (attempts, found) == ([1, 2], [])
