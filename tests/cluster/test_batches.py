"""Batches on a cluster: their members are in other slots, and what they have done is relayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from tenacity import wait_fixed

from rsmq import Broker, Message, Reject, RetryPolicy
from rsmq.errors import SlotMoving
from rsmq.redis.scripts import COUNT_MEMBERS
from tests.cluster.cluster import Cluster
from tests.contract.witness import ask
from tests.patience import until

pytestmark = pytest.mark.usefixtures("no_task_left")


async def test_a_batch_on_a_cluster_calls_back_once(make_broker: Callable[..., Broker]) -> None:
    """Its members are done, failed, cancelled while they were delayed, or added by handlers."""
    broker, calls = make_broker(), list[dict[str, Any]]()

    @broker.handler("sms", group="sender", partitions=4, retry=RetryPolicy(max_attempts=2, wait=wait_fixed(0.01)))
    async def send(message: Message) -> None:
        if message.data == b"fail":
            raise Reject("no such number")
        if message.data == b"parent":
            assert message.batch is not None
            await message.batch.publish("sms", "child", key="other")

    @broker.handler("reports", group="r", partitions=1)
    async def report(payload: dict[str, Any]) -> None:
        calls.append(payload)

    async with broker.running():
        about = {"group": "sender", "on_complete": "reports", "on_success": "reports"}
        async with broker.batch("one", **about) as batch:
            for number in range(20):
                await batch.publish("sms", "done", key=str(number))
            await batch.publish("sms", "fail", key="a")
            await batch.publish("sms", "parent", key="b")
            delayed = await batch.publish("sms", "late", key="c", delay="1h")
        await broker.cancel(delayed)
        await until(lambda: bool(calls), "it calls back")
        topic = await broker.topics.existing("sms")
        assert await broker.dead_letters.replay(topic, "sender") == 1
        async with broker.batch("two", **about) as batch:
            pass
        await until(lambda: len(calls) == 3, "the second one calls back")
        waiting = [await ask(broker, "XLEN", broker.keys.out("sms", number, "sender")) for number in range(4)]
    assert [(each["total"], each["done"], each["failed"], each["cancelled"]) for each in calls[:1]] == [(24, 22, 1, 1)]
    assert sorted(each["state"] for each in calls) == ["complete", "complete", "success"]
    assert sum(waiting) == 0


async def test_a_batch_over_moving_slots_calls_back_once(make_broker: Callable[..., Broker], cluster: Cluster) -> None:
    """The slots of the members' partitions, of the batch and of its callback move while members are published and end.
    Each step is done once, and each member has its result."""
    broker, calls, steps, refs = make_broker(), list[dict[str, Any]](), Counter[str](), list[Any]()

    @broker.handler("sms", group="sender", partitions=2, retry=RetryPolicy(max_attempts=3, wait=wait_fixed(0.01)))
    async def send(number: int, message: Message) -> int:
        async with message.step("sent") as step:
            if not step.is_done:
                steps[message.id] += 1
        if message.attempt == 1 and number % 3 == 0:
            raise OSError("once more")
        return number * number

    @broker.handler("reports", group="r", partitions=1)
    async def report(payload: dict[str, Any]) -> None:
        calls.append(payload)

    async with broker.running():
        async with (
            broker.batch("moved", group="sender", on_complete="reports") as batch,
            anyio.create_task_group() as all_,
        ):

            async def move() -> None:
                keys = broker.keys
                for name in (keys.batch_state(batch.id), keys.stream("sms", 0), keys.stream("reports", 0)):
                    await anyio.to_thread.run_sync(cluster.migrate, name)

            all_.start_soon(move)
            for number in range(60):
                ref = await batch.publish("sms", number, key=str(number % 7), message_id=f"m{number}", keep_result="1h")
                refs.append(ref)
                await anyio.sleep(0.005)
        await until(lambda: bool(calls), "it calls back")
        results = [await broker.result(each, group="sender", timeout="5s") for each in refs]
    assert [(each["total"], each["done"], each["missing"]) for each in calls] == [(60, 60, 0)]
    assert results == [number * number for number in range(60)]
    assert steps == Counter({f"m{number}": 1 for number in range(60)})


async def test_a_batch_that_has_moved_in_part_waits_for_the_rest(
    make_broker: Callable[..., Broker], cluster: Cluster
) -> None:
    """Its state is at the new node, its members and its end are not: nothing is counted anew there, or left out."""
    broker, calls, handled = make_broker(), list[dict[str, Any]](), list[int]()

    @broker.handler("sms", group="sender", partitions=2)
    async def send(number: int) -> None:
        handled.append(number)

    @broker.handler("reports", group="r", partitions=1)
    async def report(payload: dict[str, Any]) -> None:
        calls.append(payload)

    async with broker.running():
        async with broker.batch("halves", group="sender", on_complete="reports") as batch:
            await batch.publish("sms", 0)
            names = broker.keys.batch_counts(batch.id)
            await until(lambda: ask(broker, "EXISTS", names[1]), "the first one is counted")
            with cluster.moving(names[0], only=names[:1]):
                for number in range(1, 4):
                    await batch.publish("sms", number)
                for some in (names[:1], names):
                    with pytest.raises(SlotMoving):
                        await COUNT_MEMBERS(broker.client, some, (batch.id, "left", "", "b", 1, 1, "done"))
        await until(lambda: bool(calls), "it calls back")
    assert sorted(handled) == list(range(4))
    assert [(each["total"], each["done"], each["missing"]) for each in calls] == [(4, 4, 0)]
