"""Races of the data path, each forced by hand: what happens while something is awaited."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from redis.exceptions import NoScriptError
from tenacity import wait_fixed

from rsmq import Broker, Message, RetryPolicy
from rsmq.consumer.reading.fetcher import Fetcher
from rsmq.consumer.running.execution import build_runner
from rsmq.consumer.running.runner import Runner
from rsmq.consumer.settling.settler import Settler
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.queue import Queue
from rsmq.errors import BrokerUnavailable
from rsmq.handler.handler import build_handler
from rsmq.model.clock import ServerClock
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.client.raw_connection import RawConnection, pack
from rsmq.redis.scripts import OK
from tests.consumer.test_queue import make_context, make_lane, make_message
from tests.contract.witness import settled
from tests.patience import until
from tests.servers import Server


class HeldSettler:
    """A settler whose replies wait until the test sets `open`."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.asked: list[str] = []
        self.clock = ServerClock()
        self.notes = self
        self.wants_results = False

    def check_by(self, _runs: Any) -> None:
        """There are no steps."""

    def keep_failure(self, _message: Message, _lane: Lane, _reason: str, _error: str) -> None:
        """There is no result."""

    def schedule(self, _lane: Lane) -> None:
        """Nothing is settled here."""

    def add_done(self, _lane: Lane, _entry_ids: list[bytes]) -> None:
        """Nothing is settled here."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def answer(*_args: Any, **_more: Any) -> Any:
            self.asked.append(name)
            await self.open.wait()
            return (OK, timedelta(0)) if name == "charge" else True

        return answer


@asynccontextmanager
async def pool(
    function: Any, settler: HeldSettler, *, batch: int | None = None, **options: Any
) -> AsyncIterator[Runner]:
    """A runner for a handler, on a queue of its own."""
    linger = None if batch is None else timedelta(milliseconds=1)
    handler = build_handler(function, "topic", group="group", batch=batch, linger=linger, **options)
    runner = build_runner(handler, (), Queue(is_ordered=True), settler, Counter())  # type: ignore[arg-type]
    async with anyio.create_task_group() as tasks:
        await tasks.start(runner.run)
        yield runner
        tasks.cancel_scope.cancel()


def again(lane: Lane, number: int, key: int, *, is_suspect: bool = False) -> Message:
    """A redelivered message."""
    message = make_message(lane, number, key, is_suspect=is_suspect)
    message.is_redelivered, message.attempt = True, 2
    return message


async def turns(count: int = 20) -> None:
    """Let everything that can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("batch", [None, 10])
async def test_message_does_not_start_when_its_lease_is_lost_during_the_charge(batch: int | None) -> None:
    """The message counts as running meanwhile, so that a handover waits for it; without the lease it does not start."""
    lane, settler, started = make_lane(), HeldSettler(), list[Any]()

    async def one(_data: bytes, message: Message) -> None:
        started.append(message)

    async def many(_data: list[bytes], messages: list[Message]) -> None:
        started.extend(messages)

    async with pool(one if batch is None else many, settler, batch=batch) as runner:
        runner.queue.offer(lane, [again(lane, 1, 1)])
        await runner.wake()
        await until(lambda: settler.asked == ["charge"], "it asks to start")
        assert runner.running_of(lane) == 1
        lane.lease.lose()
        settler.open.set()
        await turns()
        assert (started, runner.running_of(lane), runner.queue.in_flight) == ([], 0, 0)


async def test_failed_message_counts_as_running_until_it_is_parked() -> None:
    """A handover or a stop waits for that: otherwise the next owner would start the message at once."""
    lane, settler = make_lane(), HeldSettler()

    async def fails(_data: bytes) -> None:
        raise ValueError

    async with pool(fails, settler) as runner:
        runner.queue.offer(lane, [make_message(lane, 1, 1)])
        await runner.wake()
        await turns()
        assert (settler.asked, runner.running_of(lane)) == (["park"], 1)
        settler.open.set()
        await turns()
        assert runner.running_of(lane) == 0


@pytest.mark.parametrize("batch", [None, 1])
async def test_suspect_is_settled_before_the_next_one_starts(batch: int | None) -> None:
    """The next one may end the process, and with it an acknowledgement that waits for a batch."""
    lane, settler, started = make_lane(), HeldSettler(), list[bytes]()

    async def one(_data: bytes, message: Message) -> None:
        started.append(message.entry_id)

    async def many(_data: list[bytes], messages: list[Message]) -> None:
        started.extend(message.entry_id for message in messages)

    async with pool(one if batch is None else many, settler, batch=batch) as runner:
        runner.queue.offer(lane, [again(lane, n, n, is_suspect=True) for n in (1, 2)])
        await runner.wake()
        await until(lambda: "charge" in settler.asked, "it asks to start")
        first, settler.open = settler.open, asyncio.Event()
        first.set()
        await until(lambda: "settle" in settler.asked, "it settles")
        await turns()
        assert started == [b"1-0"]
        settler.open.set()
        runner.wake_soon()
        await until(lambda: len(started) >= 2, "two have started")
        assert started == [b"1-0", b"2-0"]


async def test_linger_leaves_no_waiter_in_the_pool() -> None:
    """A batch that lingered until its deadline must not leave its future among the idle tasks."""
    lane, settler = make_lane(), HeldSettler()

    async def many(_data: list[bytes]) -> None: ...

    async with pool(many, settler, batch=10) as runner:
        for number in range(20):
            runner.queue.offer(lane, [make_message(lane, number, None)])
            await runner.wake()
            await until(lambda: not runner.queue.in_flight, "nothing is in flight")
        await turns()
        assert len(runner._idle) <= len(runner._task_slots)


def make_fetcher(client: Client, settings: Settings, lanes: dict[int, Lane], queue: Queue) -> Fetcher:
    """A fetcher that has lanes and a queue, but no other roles."""
    runner: Any = SimpleNamespace(queue=queue)
    unused: Any = None
    return Fetcher(make_context(client, settings, lanes), runner, unused, unused)


async def test_late_read_is_not_given_to_a_new_lane_of_its_partition(client: Client, settings: Settings) -> None:
    """It would overtake what is pending there, which the owner of the new lane takes over first."""
    old, new, queue = make_lane(), make_lane(), Queue(is_ordered=True)
    fetcher = make_fetcher(client, settings, {0: new}, queue)
    reply = [[old.stream.encode(), [[b"9-0", [b"data", b"x", b"key", b"k"]]]]]
    await fetcher._offer(reply, [old], 100)
    assert (queue.in_flight, new.in_flight) == (0, set())
    await fetcher._offer(reply, [new], 100)
    assert (queue.in_flight, new.in_flight) == (1, {b"9-0"})


async def test_reconnecting_ends_the_read_on_the_last_connection(client: Client, settings: Settings) -> None:
    """A read that is still on its way there would deliver messages in a reply that is never read."""
    last, fetcher = RawConnection(client), make_fetcher(client, settings, {}, Queue(is_ordered=True))
    await last.open()
    fetcher._read_by, fetcher._read_of = last.name, [make_lane()]
    await fetcher._connect()
    with pytest.raises(BrokerUnavailable):
        await last.exchange([pack(("PING",))])
    assert not fetcher.is_read_late
    await last.close()
    await fetcher._connection.close()


async def test_hand_back_that_fails_keeps_nothing_in_flight(
    client: Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next member that takes the lane over, perhaps this one, must find these messages again."""

    async def fails(*_args: Any) -> None:
        raise BrokerUnavailable("away")

    monkeypatch.setattr("rsmq.consumer.settling.settler.HAND_BACK", fails)
    lane = make_lane()
    lane.in_flight = {b"1-0", b"2-0"}
    settler = Settler(make_context(client, settings), lambda _lane: None)
    with pytest.raises(BrokerUnavailable):
        await settler.hand_back(lane, [make_message(lane, 1, 1)])
    assert lane.in_flight == {b"2-0"}


async def test_lane_that_cannot_be_settled_leaves_the_others_settled(client: Client, settings: Settings) -> None:
    """One call settles all lanes. If the lease key of one has a foreign type, the others are settled all the same."""
    lost, context = list[Lane](), make_context(client, settings)
    settler = Settler(context, lost.append)
    lanes = [make_lane(number, settings.prefix) for number in range(3)]
    for lane in lanes:
        await client.execute_command("XGROUP", "CREATE", lane.stream, "group", "0", "MKSTREAM")
        await client.execute_command("HSET", lane.lease_key, "owner", "me", "epoch", lane.epoch)
        entry_id = await client.execute_command("XADD", lane.stream, "*", "data", "x")
        await client.execute_command("XREADGROUP", "GROUP", "group", "me", "STREAMS", lane.stream, ">")
        lane.in_flight.add(entry_id)
        lane.done.append(entry_id)
        settler.schedule(lane)
    await client.execute_command("SET", lanes[1].lease_key, "no hash")
    (batch,) = settler.take()
    assert len(batch) == 3
    connection = RawConnection(client)
    await connection.open()
    (reply,) = await connection.exchange([settler.packed(batch)])
    await settler.confirm(batch, reply)
    await connection.close()
    assert lost == [lanes[1]]
    assert [len(lane.in_flight) for lane in lanes] == [0, 1, 0]
    assert context.stats["refused"] == 1
    await settler.wait_until_settled([lanes[0], lanes[2]])


async def test_settle_that_meets_two_restarts_is_sent_again(
    client: Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restarted server has forgotten the script, and dies before it is loaded: what is done stays in the lane."""

    class Fails:
        async def __call__(self, *_args: Any) -> None:
            raise BrokerUnavailable("away again")

    monkeypatch.setattr("rsmq.consumer.settling.settler.SETTLE_MESSAGES", Fails())
    lane = make_lane()
    lane.in_flight, lane.done = {b"1-0"}, [b"1-0"]
    settler = Settler(make_context(client, settings), lambda _lane: None)
    settler.schedule(lane)
    (batch,) = settler.take()
    assert lane.done == []
    await settler.confirm(batch, NoScriptError("forgotten"))
    assert (lane.done, settler.take() != []) == ([b"1-0"], True)


async def test_retry_that_a_failover_brought_back_is_removed(server: Server, prefix: str) -> None:
    """The lost master had confirmed the start of a retry that the new one still lists: the retry poller asks again."""
    broker = Broker(Settings(url=server.url, prefix=prefix, preflight="warn"))
    done: list[int] = []

    @broker.handler("t", group="g", partitions=1, retry=RetryPolicy(max_attempts=2, wait=wait_fixed(0.01)))
    async def handle(_order: dict[str, int], message: Message) -> None:
        if message.attempt == 1 and not done:
            raise ValueError("once")
        done.append(message.attempt)

    retry = broker.keys.retry("t", 0, "g")
    async with broker.running():
        await broker.publish("t", {"n": 1}, key="k")
        await until(lambda: done == [2], "it is handled")
        await settled(broker, "t")
        assert broker.worker is not None
        (consumer,) = broker.worker.consumers
        await until(lambda: consumer.lanes[0].recovery.retry_at == float("inf"), "no retry is expected any more")
        ((entry_id, _),) = await broker.client.execute_command("XRANGE", broker.keys.stream("t", 0), "-", "+")
        with server.client() as operator:
            operator.zadd(retry, {entry_id + b"|1": 1})  # what was lost with the master
            reader, _, _ = operator.hget(broker.keys.lease("t", 0, "g"), "reader").partition(b" ")
            operator.client_kill_filter(_id=reader.decode())  # its connection ended with it
        await settled(broker, "t")
