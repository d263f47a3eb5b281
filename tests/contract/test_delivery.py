"""Nothing accepted is lost, and every group gets every message: promises 1 and 2."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import anyio
import pytest

from rsmq import Broker, Message
from rsmq.model.clock import from_epoch_ms
from tests.contract.witness import Witness, ask, lengths, patient, settled
from tests.patience import until


def listen(broker: Broker, witness: Witness, group: str = "g", **options: object) -> None:
    """A handler that notes the number of each message, with its group."""

    @broker.handler("t", group=group, **options)  # type: ignore[arg-type]
    async def note(order: dict[str, int]) -> None:
        witness.note((group, order["n"]))


def numbers(count: int, group: str = "g", start: int = 0) -> list[tuple[str, int]]:
    """The messages that a group has handled."""
    return [(group, n) for n in range(start, start + count)]


async def test_what_publish_confirmed_is_handled(broker: Broker, witness: Witness) -> None:
    """Concurrent, batched and single publishing: each message is handled exactly once and settled."""
    listen(broker, witness)
    async with broker:
        await broker.publish_many("t", [{"n": n} for n in range(500)], key=lambda order: f"k{order['n'] % 9}")
        await asyncio.gather(*[broker.publish("t", {"n": n}) for n in range(500, 700)])
        async with broker.running():
            for n in range(700, 720):
                await broker.publish("t", {"n": n}, key="one")
            await witness.sees(numbers(720))
            await settled(broker, "t")
    assert len(witness.seen) == 720


async def test_what_was_published_before_a_worker_exists_is_kept(
    make_broker: Callable[..., Broker], witness: Witness
) -> None:
    """The message stays in the topic although the publisher is gone and no group exists."""
    async with make_broker() as publisher:
        await publisher.publish("t", {"n": 0})
    later = make_broker()
    listen(later, witness)
    async with later.running():
        await witness.sees(numbers(1))


async def test_every_group_gets_every_message_stored_once(broker: Broker, witness: Witness) -> None:
    """Three groups share one copy in the server."""
    for group in ("a", "b", "c"):
        listen(broker, witness, group)
    async with broker.running():
        await broker.publish_many("t", [{"n": n} for n in range(100)])
        for group in ("a", "b", "c"):
            await witness.sees(numbers(100, group))
        await settled(broker, "t")
        assert await lengths(broker, "t") == 100
    assert len(witness.seen) == 300


async def test_messages_survive_a_stop_of_the_worker(make_broker: Callable[..., Broker], witness: Witness) -> None:
    """Fetched messages that were not started are given back; the next worker handles each of them one time."""
    for _ in range(3):
        broker = make_broker(prefetch=50)
        listen(broker, witness, concurrency=4)
        async with broker.running():
            before = len(witness.seen)
            await broker.publish_many("t", [{"n": n} for n in range(before, before + 300)])
            await until(lambda before=before: len(witness.seen) > before, "it has begun")
        witness.seen.sort()
    broker = make_broker()
    listen(broker, witness)
    total = 0
    async with broker.running():
        total = await lengths(broker, "t")
        await settled(broker, "t")
    assert len(witness.seen) == total


async def test_cancelled_worker_loses_nothing(make_broker: Callable[..., Broker], witness: Witness) -> None:
    """After a cancellation instead of a stop, unsettled messages are delivered again."""
    broker, began = make_broker(), anyio.Event()

    @broker.handler("t", group="g")
    async def never_ends(_order: dict[str, int]) -> None:
        began.set()
        await anyio.sleep_forever()

    async with broker:
        await broker.publish_many("t", [{"n": n} for n in range(50)])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(broker.run)
            await began.wait()
            tasks.cancel_scope.cancel()
    later = make_broker()
    listen(later, witness)
    async with later.running():
        await witness.sees(numbers(50))


@pytest.mark.parametrize("start", ["earliest", "latest", "id", "time"])
async def test_a_new_group_starts_at_its_configured_position(
    make_broker: Callable[..., Broker], witness: Witness, start: str
) -> None:
    """The start is the first message, only new ones, an id, or a time."""
    async with make_broker() as publisher:
        await patient(publisher.topics.ensure)("t", 1)
        for n in range(4):
            await publisher.publish("t", {"n": n})
            await anyio.sleep(0.003)  # ids of different milliseconds, so that a time can tell them apart
        rows = await ask(publisher, "XRANGE", publisher.keys.stream("t", 0), "-", "+")
        ids = [entry_id.decode() for entry_id, _ in rows]
    begin = {"id": ids[1], "time": from_epoch_ms(int(ids[2].partition("-")[0]))}.get(start, start)
    first = {"earliest": 0, "latest": 4, "id": 2, "time": 2}[start]
    broker = make_broker()
    listen(broker, witness, start=begin)
    async with broker.running():
        await broker.publish("t", {"n": 4})
        await witness.sees(numbers(5 - first, start=first))
    assert [n for _, n in witness.seen] == list(range(first, 5))


async def test_start_counts_only_for_a_new_group(make_broker: Callable[..., Broker], witness: Witness) -> None:
    """An existing group continues at its position and ignores the start of its handler."""
    first = make_broker()
    listen(first, witness)
    async with first.running():
        await first.publish("t", {"n": 0})
        await witness.sees(numbers(1))
        await settled(first, "t")
        first.stop()
    async with make_broker() as publisher:
        await publisher.publish("t", {"n": 1})
    again = make_broker()
    listen(again, witness, start="latest")
    async with again.running():
        await witness.sees(numbers(2))


@pytest.mark.parametrize("start", ["earliest", "time"])
async def test_a_reset_replays_the_topic(broker: Broker, witness: Witness, start: str) -> None:
    """While its worker runs, the group handles all kept messages again; the other group does not."""
    listen(broker, witness)
    listen(broker, witness, "other")
    async with broker.running():
        await broker.publish_many("t", [{"n": n} for n in range(100)])
        await settled(broker, "t")
        await witness.sees(numbers(100))
        witness.seen.clear()
        moment = datetime.now(UTC) - timedelta(hours=1)
        await patient(broker.reset_group)("t", "g", "earliest" if start == "earliest" else moment)
        # messages that the worker read before it learns of the new epoch are not settled and are delivered again
        await witness.sees(numbers(100), again=True)
        await settled(broker, "t")
        assert ("other", 0) not in witness.seen


async def test_a_paused_group_waits(broker: Broker, witness: Witness) -> None:
    """A paused group gets no new messages, other groups do; after the resume it gets all of them."""
    listen(broker, witness)
    listen(broker, witness, "other")
    async with broker.running():
        await broker.publish("t", {"n": 0})
        await witness.sees([("g", 0), ("other", 0)])
        await patient(broker.pause_group)("t", "g")
        assert broker.worker is not None
        consumer = next(each for each in broker.worker.consumers if each.handler.group == "g")
        await until(lambda: consumer.membership.paused, "the pause is noticed")
        await until(lambda: consumer.fetchers.is_paused, "the reader is paused")
        await broker.publish_many("t", [{"n": n} for n in range(1, 50)])
        await witness.sees(numbers(49, "other", start=1))
        assert not {what for what in witness.seen if what[0] == "g"} - {("g", 0)}
        await patient(broker.resume_group)("t", "g")
        await witness.sees(numbers(50))


async def test_published_twice_with_an_id_is_one_message(broker: Broker, witness: Witness) -> None:
    """Also when both are published at the same time."""
    listen(broker, witness)
    async with broker.running():
        ids = await asyncio.gather(*[broker.publish("t", {"n": 0}, message_id="order-7") for _ in range(5)])
        ids.append(await broker.publish("t", {"n": 0}, message_id="order-7"))
        assert set(ids) == {"order-7"}
        await broker.publish("t", {"n": 1})
        await witness.sees(numbers(2))
        await settled(broker, "t")
        assert await lengths(broker, "t") == 2


@pytest.mark.parametrize("how", ["delay", "at"])
async def test_a_delayed_message_comes_when_it_is_due(broker: Broker, how: str) -> None:
    """A delayed message is handled one time, not before it is due."""
    came: list[datetime] = []

    @broker.handler("t", group="g")
    async def note(_order: dict[str, int]) -> None:
        came.append(datetime.now(UTC))

    async with broker.running():
        due = datetime.now(UTC) + timedelta(milliseconds=400)
        if how == "delay":
            await broker.publish("t", {"n": 0}, delay=timedelta(milliseconds=400))
        else:
            await broker.publish("t", {"n": 0}, at=due)
        await until(lambda: came, "the delayed message comes")
        await settled(broker, "t")
    assert len(came) == 1
    assert came[0] >= due - timedelta(milliseconds=1), "it came too early"


async def test_a_message_carries_the_metadata_of_its_publisher(broker: Broker) -> None:
    """Key, id, headers, topic, group, attempt and time are those of the publisher."""
    got: list[Message] = []

    @broker.handler("t", group="g")
    async def note(message: Message) -> None:
        got.append(message)

    async with broker.running():
        identity = await broker.publish("t", {"n": 1}, key="c-42", headers={"traceparent": "00-1"})
        await until(lambda: got, "the message comes")
    (message,) = got
    assert (message.topic, message.group, message.key, message.id) == ("t", "g", "c-42", identity)
    assert (message.headers, message.attempt, message.data) == ({"traceparent": "00-1"}, 1, b'{"n":1}')
    assert abs(datetime.now(UTC) - message.timestamp) < timedelta(minutes=5)
