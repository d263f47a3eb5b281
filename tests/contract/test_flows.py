"""No key holds up others: what waits behind its key is put aside. Order, counts and bounds hold all the same."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest
import redis.asyncio

from rsmq import Broker, Message, Retry, RetryPolicy, Settings
from rsmq.control import Cancelled
from rsmq.model.partition import partition_for
from tests.contract.witness import Witness, ask, dead, settled
from tests.matrix.way import one_server, steady_connections
from tests.patience import until
from tests.servers import Server

Make = Callable[..., Broker]
PREFETCH = 40


@pytest.fixture
def few(make_broker: Make) -> Broker:
    """A worker with little memory, of one partition."""
    return make_broker(prefetch=PREFETCH, partitions=1)


def far_of(broker: Broker) -> int:
    """How many messages wait of which only the id is kept."""
    consumers = broker.worker.consumers if broker.worker is not None else ()
    return sum(consumer.queue.far(consumer.lanes.values()) for consumer in consumers)


async def counts(broker: Broker, topic: str = "t", group: str = "g") -> list[int]:
    """The counts of deliveries of all pending messages of partition 0, by id."""
    rows = await ask(broker, "XPENDING", broker.keys.stream(topic, 0), group, "-", "+", 10_000)
    return [row[3] for row in rows]


class Hot:
    """A handler whose first message of the key `hot` waits for `gate`."""

    def __init__(self, broker: Broker, witness: Witness, **options: Any) -> None:
        self.broker, self.witness, self.gate, self.attempts = broker, witness, anyio.Event(), list[int]()
        broker.handler("t", group="g", concurrency=4, **options)(self.handle)

    async def handle(self, order: dict[str, int], message: Message) -> None:
        if message.key == "hot":
            await self.gate.wait()
        self.attempts.append(message.attempt)
        self.witness.note((message.key, order["n"]))

    async def publish(self, hot: int, others: int = 0) -> list[tuple[str, int]]:
        """Messages of the hot key, and after them one each of other keys."""
        await self.broker.publish_many("t", [{"n": n} for n in range(hot)], key=lambda _: "hot")
        await self.broker.publish_many("t", [{"n": n} for n in range(others)], key=lambda order: f"k{order['n']}")
        return [*[("hot", n) for n in range(hot)], *[(f"k{n}", n) for n in range(others)]]

    @property
    def order(self) -> list[int]:
        """The numbers of the hot key as they were handled."""
        return [n for key, n in self.witness.seen if key == "hot"]


@pytest.fixture
def hot(few: Broker, witness: Witness) -> Hot:
    """The same with the few."""
    return Hot(few, witness)


@steady_connections
async def test_other_keys_of_the_partition_are_handled_while_a_key_has_a_backlog(hot: Hot) -> None:
    """However much of one key waits: twenty times what fits into memory."""
    async with hot.broker.running():
        every = await hot.publish(20 * PREFETCH, others=20)
        await until(lambda: len(hot.witness.seen) == 20, "the others are handled, and none of the hot key is")
        assert hot.order == []
        await until(lambda: far_of(hot.broker) >= 19 * PREFETCH - 4, "the others of the hot key are kept as ids")
        hot.gate.set()
        await hot.witness.sees(every)
        await settled(hot.broker, "t")
    assert hot.order == list(range(20 * PREFETCH))
    assert set(hot.attempts) == {1}


async def test_what_waits_as_an_id_has_provably_not_started(hot: Hot) -> None:
    """Its count of deliveries is 0: no suspect, whatever its owner dies of."""
    async with hot.broker.running():
        await hot.publish(5 * PREFETCH)
        await until(lambda: far_of(hot.broker) > 2 * PREFETCH, "most wait as ids")
        far = far_of(hot.broker)
        await patient_until(hot.broker, far)
        hot.gate.set()
        await settled(hot.broker, "t")


async def patient_until(broker: Broker, far: int) -> None:
    """Until the server knows it of so many."""
    with anyio.fail_after(20):
        while (await counts(broker)).count(0) < far:
            await asyncio.sleep(0.01)


@steady_connections
async def test_next_owner_goes_on_in_order_with_first_attempts(make_broker: Make, witness: Witness) -> None:
    """A worker is stopped with a backlog of ids; nothing of it counts as an attempt."""
    first = Hot(make_broker(prefetch=PREFETCH, partitions=1), witness)
    async with first.broker.running():
        every = await first.publish(10 * PREFETCH)
        await until(lambda: far_of(first.broker) > 5 * PREFETCH, "most wait as ids")
        async with first.broker:
            pass
    second = Hot(make_broker(prefetch=PREFETCH, partitions=1), witness)
    second.gate.set()
    async with second.broker.running():
        await witness.sees(every)
        await settled(second.broker, "t")
    assert second.order == list(range(10 * PREFETCH))
    assert set(second.attempts) == {1}


@one_server
async def test_lost_connection_takes_over_only_what_is_not_known(hot: Hot) -> None:
    """The reader is ended while ids wait: nothing starts twice, nothing out of order."""
    async with hot.broker.running():
        every = await hot.publish(10 * PREFETCH)
        await until(lambda: far_of(hot.broker) > 5 * PREFETCH, "most wait as ids")
        (consumer,) = hot.broker.worker.consumers  # type: ignore[union-attr]
        before = consumer.lanes[0].recovery.number
        reader = consumer.fetchers.reader(0).split()[0]
        await ask(hot.broker, "CLIENT", "KILL", "ID", reader)
        await until(lambda: consumer.lanes[0].recovery.number > before, "it has noticed")
        await until(lambda: consumer.lanes[0].is_readable, "it reads again")
        assert consumer.stats["redelivered"] < PREFETCH
        hot.gate.set()
        await hot.witness.sees(every)
        await settled(hot.broker, "t")
    assert hot.order == list(range(10 * PREFETCH))


@steady_connections
async def test_bound_stops_only_the_partition_that_has_reached_it(make_broker: Make, witness: Witness) -> None:
    """The others are read on."""
    broker = make_broker(prefetch=PREFETCH, partitions=4, read_ahead=100)
    hot = Hot(broker, witness)
    async with broker.running():
        await hot.publish(20 * PREFETCH)
        await until(lambda: far_of(broker) >= 100, "the bound is reached")
        await broker.publish_many("t", [{"n": n} for n in range(200)], key=lambda order: f"k{order['n']}")
        (consumer,) = broker.worker.consumers  # type: ignore[union-attr]
        (full,) = [lane for lane in consumer.lanes.values() if lane.flows.far]
        free = [n for n in range(200) if partition_for(f"k{n}", 4) != full.partition]
        await witness.sees([(f"k{n}", n) for n in free])
        assert full.flows.far <= 100 + PREFETCH
        hot.gate.set()
        await settled(broker, "t")
    assert hot.order == list(range(20 * PREFETCH))


async def test_deleted_trimmed_and_cancelled_messages_leave_their_flow(hot: Hot) -> None:
    """What other clients delete becomes a dead letter, what is cancelled never runs, and the rest goes on."""
    async with hot.broker.running():
        refs = await hot.broker.publish_many("t", [{"n": n} for n in range(6 * PREFETCH)], key=lambda _: "hot")
        await until(lambda: far_of(hot.broker) > 4 * PREFETCH, "most wait as ids")
        await patient_until(hot.broker, far_of(hot.broker))
        rows = await ask(hot.broker, "XRANGE", hot.broker.keys.stream("t", 0), "-", "+")
        ids = [row[0] for row in rows]
        while (await ask(hot.broker, "XPENDING", hot.broker.keys.stream("t", 0), "g"))[0] < len(ids):
            await asyncio.sleep(0.01)  # what is deleted before it was delivered leaves nothing behind
        await ask(hot.broker, "XDEL", hot.broker.keys.stream("t", 0), *ids[-20:-10])
        (consumer,) = hot.broker.worker.consumers  # type: ignore[union-attr]
        consumer.lanes[0].flows.aside.update(dict.fromkeys(ids[-20:-15]))  # as if these were not put aside yet
        consumer._read_ahead.wanted.set()
        await until(lambda: not consumer.lanes[0].flows.aside, "they are, and found to be deleted")
        assert isinstance(await hot.broker.cancel(refs[-1], topic="t", key="hot", group="g"), Cancelled)
        hot.gate.set()
        await settled(hot.broker, "t")
        assert len(await dead(hot.broker, "t", "g")) == 10
    expected = [*range(6 * PREFETCH - 20), *range(6 * PREFETCH - 10, 6 * PREFETCH - 1)]
    assert hot.order == expected


async def test_what_a_full_topic_trims_leaves_its_flow_without_dead_letters(
    make_broker: Make, witness: Witness
) -> None:
    """Also if the setting came after the worker had started."""
    broker = make_broker(prefetch=PREFETCH, partitions=1, retention_interval="50ms")
    hot = Hot(broker, witness)
    async with broker.running():
        await hot.publish(12 * PREFETCH)
        await until(lambda: far_of(broker) > 10 * PREFETCH, "most wait as ids")
        (consumer,) = broker.worker.consumers  # type: ignore[union-attr]
        await broker.topics.change("t", max_length=100, on_full="trim")
        await until(lambda: consumer.topic.on_full == "trim", "the worker knows")
        await broker.publish_many("t", [{"n": n} for n in range(12 * PREFETCH, 13 * PREFETCH)], key=lambda _: "hot")
        hot.gate.set()
        await settled(broker, "t")
        assert consumer.stats["trimmed"] > 5 * PREFETCH
        assert not await dead(broker, "t", "g")
    assert hot.order[-1] == 13 * PREFETCH - 1
    assert hot.order == sorted(hot.order)


async def test_batches_keep_order_of_a_key_with_a_backlog(make_broker: Make, witness: Witness) -> None:
    """A batch takes many of a key, and the rest is read again in time."""
    broker, gate = make_broker(prefetch=PREFETCH, partitions=1), anyio.Event()

    @broker.handler("t", group="g", batch=7, concurrency=2, retry=RetryPolicy(max_attempts=3))
    async def handle(orders: list[dict[str, int]]) -> None:
        await gate.wait()
        for order in orders:
            witness.note(order["n"])

    async with broker.running():
        await broker.publish_many("t", [{"n": n} for n in range(10 * PREFETCH)], key=lambda _: "hot")
        await until(lambda: far_of(broker) > 5 * PREFETCH, "most wait as ids")
        gate.set()
        await witness.sees(list(range(10 * PREFETCH)))
        await settled(broker, "t")
    assert witness.seen == list(range(10 * PREFETCH))


@pytest.mark.parametrize("ending", ["flush", "reset"])
async def test_group_that_is_made_again_forgets_the_ids(hot: Hot, ending: str) -> None:
    """What waited under the old ids is gone, or comes again; nothing of it is settled under them."""
    async with hot.broker.running():
        every = await hot.publish(5 * PREFETCH)
        await until(lambda: far_of(hot.broker) > 2 * PREFETCH, "most wait as ids")
        if ending == "flush":
            await ask(hot.broker, "DEL", hot.broker.keys.stream("t", 0))
            every = await hot.publish(5 * PREFETCH)
        else:
            await ask(hot.broker, "XGROUP", "SETID", hot.broker.keys.stream("t", 0), "g", "0")
            await hot.broker.publish("t", {"n": 5 * PREFETCH}, key="hot")
        hot.gate.set()
        await hot.witness.sees(every, again=True)
        await settled(hot.broker, "t")
    last = [hot.order.index(n) for n in range(5 * PREFETCH)]
    assert last == sorted(last), "first successes are in order"


async def test_handler_without_options_sends_the_commands_that_it_sent_before_reading_ahead(
    server: Server, prefix: str, witness: Witness
) -> None:
    """Byte for byte, while no key is hot: recorded with commit 92ae696, before there were flows. By MONITOR of the
    shared server, whichever way the other tests take."""
    broker, found = Broker(Settings(url=server.url, prefix=prefix, preflight="warn", partitions=1)), list[str]()

    @broker.handler("t", group="g")
    async def handle(order: dict[str, int]) -> None:
        witness.note(order["n"])

    async def listen() -> None:
        async with redis.asyncio.Redis.from_url(broker.settings.url) as client, client.monitor() as monitor:
            listening.set()
            async for each in monitor.listen():
                words = each["command"].split()
                if broker.keys.stream("t", 0) in each["command"] and words[0] in PATH:
                    found.append(each["command"])

    listening = anyio.Event()
    async with broker.running(), anyio.create_task_group() as tasks:
        await broker.publish("t", {"n": 0}, key="a")
        await settled(broker, "t")
        (consumer,) = broker.worker.consumers  # type: ignore[union-attr]
        recovery = consumer.lanes[0].recovery
        await until(lambda: recovery.retry_at > 0 and not recovery.claims, "it has looked for retries once")
        tasks.start_soon(listen)
        await listening.wait()
        for n in range(1, 4):
            await broker.publish("t", {"n": n}, key=f"k{n}")
            await until(lambda: sum(each.startswith("XACK") for each in found) >= n, "it is settled")  # noqa: B023
        member = broker.worker.member if broker.worker is not None else ""
        tasks.cancel_scope.cancel()
    stream = broker.keys.stream("t", 0)
    sent = [re.sub(r"\d{13}-\d+", "ID", each) for each in found]
    assert set(sent) == {
        f"EXISTS {broker.keys.cancels('t', 0, 'g')}",
        f"XACK {stream} g ID",
        f"XREADGROUP GROUP g {member} COUNT 1000 BLOCK 2000 STREAMS {stream} >",
    }
    assert sent.count(f"XACK {stream} g ID") == 3


PATH = ("XREADGROUP", "XACK", "XCLAIM", "XRANGE", "EXISTS")
"""Commands of the way of a message, but not of heartbeats and audits; XACK is that of the script that settles it."""


async def test_memory_is_bounded_by_bytes_too(make_broker: Make, witness: Witness) -> None:
    """Of large messages fewer are read than RSMQ_PREFETCH allows, until those in memory are handled."""
    broker, gate = make_broker(partitions=1, prefetch_bytes=100_000), anyio.Event()

    @broker.handler("t", group="g", concurrency=4)
    async def handle(order: dict[str, Any]) -> None:
        await gate.wait()
        witness.note(order["n"])

    async with broker:
        await broker.publish_many("t", [{"n": n, "text": 10_000 * "x"} for n in range(300)])
    async with broker.running():
        (consumer,) = broker.worker.consumers  # type: ignore[union-attr]
        await until(lambda: consumer._runner.is_starved, "the reader waits for room")
        assert 10_000 * consumer.queue.in_flight <= 3 * 100_000
        gate.set()
        await witness.sees(list(range(300)))
        await settled(broker, "t")


@steady_connections
async def test_parked_keys_do_not_stop_a_partition(make_broker: Make, witness: Witness) -> None:
    """However many: while memory is full only their ids are kept, and their bodies are read again when they are due."""
    broker = make_broker(prefetch=4, partitions=1, prefetch_bytes=20_000)
    many, text = 60, 2000 * "x"

    @broker.handler("t", group="g", concurrency=2)
    async def handle(order: dict[str, Any], message: Message) -> None:
        if message.attempt == 1 and message.key != "other":
            raise Retry("later", after=timedelta(hours=1))
        witness.note((message.key, len(order["text"]), message.headers.get("of")))

    async with broker.running():
        keys = [f"k{n}" for n in range(many)]
        sent = [await broker.publish("t", {"text": text}, key=key, headers={"of": key}) for key in keys]
        await broker.publish("t", {"text": text}, key="other", headers={"of": "other"})
        await witness.sees([("other", len(text), "other")])
        (consumer,) = broker.worker.consumers  # type: ignore[union-attr]
        (lane,) = consumer.lanes.values()
        await until(lambda: len(lane.flows.parked) == many, "all are parked")
        assert len(lane.flows.emptied) > many - 10
        assert consumer.queue.waits([lane])["retry"] == many
        await broker.cancel(sent[-1], topic="t", key=keys[-1], group="g")
        await until(lambda: len(lane.flows.parked) == many - 1, "the cancelled one waits no more")
        for ref in sent[:-1]:
            await broker.reschedule(ref, delay=timedelta(0), topic="t", group="g")
        await witness.sees([("other", len(text), "other"), *[(key, len(text), key) for key in keys[:-1]]])
        await settled(broker, "t")
    assert (consumer.queue.in_flight, consumer.queue.blocked) == (0, 0)
