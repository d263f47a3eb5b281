"""A retry that is due before the reply to its parking is read."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import anyio
import pytest
from tenacity import wait_none

from rsmq import Broker, Message, Retry, RetryPolicy, Settings
from rsmq.consumer import reclaimer
from rsmq.consumer.lane import START
from rsmq.consumer.queue import Queue
from rsmq.consumer.settler import Settler
from rsmq.script import CLAIM_PENDING, PARK_MESSAGE, RESTORE_PENDING, UNPARK_MESSAGES
from tests.contract.witness import ask, settled
from tests.patience import until


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
    """With key order the unparker sees at the same moment that a retry is due, and hears of it when it is settled: it
    must not bring it a second time."""
    broker, attempts = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1)), list[int]()
    start, offer, offered, is_heard = Settler.start, Queue.offer, list[int](), anyio.Event()

    def note(queue: Queue, lane: Any, messages: Any) -> None:
        offered.extend(message.attempt for message in messages)
        offer(queue, lane, messages)

    async def unpark(*args: Any) -> Any:
        reply = await UNPARK_MESSAGES(*args)
        if reply[2:]:
            await settled(broker, "orders")
            assert broker.worker is not None
            lane = broker.worker.consumers[0].lanes[0]
            await until(lambda: not lane.held, "it is not in hand any more")
            is_heard.set()
        return reply

    async def start_late(settler: Settler, message: Message, lane: Any) -> bool:
        lane.retry_at = 0.0
        with anyio.fail_after(30):
            while await ask(broker, "ZCARD", lane.retry_key):
                await anyio.sleep(0.01)
        return await start(settler, message, lane)

    monkeypatch.setattr(reclaimer, "UNPARK_MESSAGES", unpark)
    monkeypatch.setattr(Queue, "offer", note)
    monkeypatch.setattr(Settler, "start", start_late)

    @broker.handler("orders", group="billing", retry=RetryPolicy(max_attempts=3, wait=wait_none()))
    async def bill(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise Retry("later")

    async with broker.running():
        await broker.publish("orders", {}, key="one")
        await until(is_heard.is_set, "the unparker has its answer")
    assert (attempts, offered) == ([1, 2], [1])


async def test_it_comes_back_though_the_audit_has_made_it_pending(
    server_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit meets its parking on the way and makes it pending, in nobody's hands: its retry comes all the same."""
    broker, attempts = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1)), list[int]()
    run, restored = Settler._run, list[bytes]()

    async def crossed(settler: Settler, script: Any, lane: Any, *args: Any) -> bool:
        result = await run(settler, script, lane, *args)
        if script is PARK_MESSAGE:
            member, keys, entry_id = lane.lease.owner, (lane.stream, lane.lease_key), args[-1]
            _, *found = await RESTORE_PENDING(broker.client, keys, (member, lane.epoch, lane.group, 1, entry_id, 1))
            restored.extend(found)
        return result

    monkeypatch.setattr(Settler, "_run", crossed)

    @broker.handler("orders", group="billing", retry=RetryPolicy(max_attempts=2, wait=wait_none()))
    async def bill(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise Retry("later", after=timedelta(seconds=1))

    async with broker.running():
        await broker.publish("orders", {})
        await settled(broker, "orders")
    assert (attempts, len(restored)) == ([1, 2], 1)


async def test_it_is_settled_while_it_is_being_taken_over(
    server_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was pending when the server was asked, and is not in hand any more when the reply is read: it runs once."""
    broker, attempts = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1)), list[int]()
    is_over, is_heard = anyio.Event(), anyio.Event()

    async def claim(*args: Any) -> Any:
        reply = await CLAIM_PENDING(*args)
        if reply[3:]:
            assert broker.worker is not None
            lane = broker.worker.consumers[0].lanes[0]
            is_over.set()
            await until(lambda: not lane.held, "it is settled")
            is_heard.set()
        return reply

    monkeypatch.setattr(reclaimer, "CLAIM_PENDING", claim)

    @broker.handler("orders", group="billing")
    async def bill(message: Message) -> None:
        attempts.append(message.attempt)
        await is_over.wait()

    async with broker.running():
        await broker.publish("orders", {}, key="one")
        await until(lambda: attempts, "it runs")
        assert broker.worker is not None
        (consumer,) = broker.worker.consumers
        consumer.lanes[0].cursor = START
        await consumer.warden.interrupt()
        await until(is_heard.is_set, "the claim has its answer")
        await broker.publish("orders", {}, key="one")
        await until(lambda: len(attempts) > 1, "the next one has run")
        await settled(broker, "orders")
    assert attempts == [1, 1]
