"""Replies that cross: a retry that is due before the reply to its parking, a settlement during a claim."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import anyio
import pytest
from tenacity import wait_none

from rsmq import Broker, Message, Retry, RetryPolicy, Settings
from rsmq.consumer.reading import reclaimer
from rsmq.consumer.settling.settler import Settler
from rsmq.consumer.waiting.queue import Queue
from rsmq.consumer.waiting.recovery import START
from rsmq.redis.scripts import CLAIM_PENDING, PARK_MESSAGE, RESTORE_PENDING, UNPARK_MESSAGES
from tests.contract.witness import ask, settled
from tests.patience import until


async def test_parked_message_that_is_due_before_the_reply_to_its_parking_is_handled_again(
    server_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retry poller brings it while its parking still waits for the reply: it must not be left pending."""
    broker, attempts = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1)), list[int]()
    run = Settler._run

    async def slow(settler: Settler, script: Any, lane: Any, *args: Any) -> bool:
        async def is_restored() -> bool:
            return not await ask(broker, "ZCARD", lane.retry_key)

        result = await run(settler, script, lane, *args)
        if script is PARK_MESSAGE:
            lane.recovery.retry_at = 0.0
            await until(is_restored, "the retry poller brings it")
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


async def test_retry_poller_leaves_a_message_that_blocks_its_key_to_its_timer(
    server_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With key order the poller asks at the moment the retry is due, and gets the reply when it is settled: the message
    must not run a second time."""
    broker, attempts = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1)), list[int]()
    start, call, offer, offered, is_heard = Settler.charge, Settler.ask, Queue.offer, list[int](), anyio.Event()

    def note(queue: Queue, lane: Any, messages: Any, *, is_ahead: bool = False) -> None:
        offered.extend(message.attempt for message in messages)
        offer(queue, lane, messages, is_ahead=is_ahead)

    async def unpark(settler: Settler, script: Any, *command: Any) -> Any:
        reply = await call(settler, script, *command)
        if script is UNPARK_MESSAGES and reply[2:]:
            await settled(broker, "orders")
            assert broker.worker is not None
            lane = broker.worker.consumers[0].lanes[0]
            await until(lambda: not lane.in_flight, "it is not in flight any more")
            is_heard.set()
        return reply

    async def start_late(settler: Settler, message: Message, lane: Any) -> bool:
        lane.recovery.retry_at = 0.0
        with anyio.fail_after(30):
            while await ask(broker, "ZCARD", lane.retry_key):
                await anyio.sleep(0.01)
        return await start(settler, message, lane)

    monkeypatch.setattr(Settler, "ask", unpark)
    monkeypatch.setattr(Queue, "offer", note)
    monkeypatch.setattr(Settler, "charge", start_late)

    @broker.handler("orders", group="billing", retry=RetryPolicy(max_attempts=3, wait=wait_none()))
    async def bill(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise Retry("later")

    async with broker.running():
        await broker.publish("orders", {}, key="one")
        await until(is_heard.is_set, "the poller has its reply")
    assert (attempts, offered) == ([1, 2], [1])


async def test_parked_message_that_the_auditor_made_pending_is_retried(
    server_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The auditor's check crosses the parking and makes the message pending, without a handler: it is still retried."""
    broker, attempts = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1)), list[int]()
    run, restored = Settler._run, list[bytes]()

    async def crossed(settler: Settler, script: Any, lane: Any, *args: Any) -> bool:
        result = await run(settler, script, lane, *args)
        if script is PARK_MESSAGE:
            member, keys, entry_id = lane.lease.owner, (lane.stream, lane.lease_key), args[0]
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


async def test_message_that_is_settled_during_a_claim_runs_once(
    server_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was pending when the server executed the claim, and is not in flight any more when the reply is read."""
    broker, attempts = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1)), list[int]()
    is_over, is_heard = anyio.Event(), anyio.Event()

    async def claim(*args: Any) -> Any:
        reply = await CLAIM_PENDING(*args)
        if reply[3:]:
            assert broker.worker is not None
            lane = broker.worker.consumers[0].lanes[0]
            is_over.set()
            await until(lambda: not lane.in_flight, "it is settled")
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
        consumer.lanes[0].recovery.cursor = START
        await consumer.fetchers.interrupt()
        await until(is_heard.is_set, "the claim has its answer")
        await broker.publish("orders", {}, key="one")
        await until(lambda: len(attempts) > 1, "the next one has run")
        await settled(broker, "orders")
    assert attempts == [1, 1]
