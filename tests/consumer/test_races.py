"""Races of the data path, each forced by hand: what happens while something is awaited."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
import pytest
from redis.exceptions import NoScriptError
from tenacity import wait_fixed

from rsmq import Broker, Message, RetryPolicy
from rsmq.connect import Client
from rsmq.consumer.execution import build_runner
from rsmq.consumer.fetcher import Fetcher
from rsmq.consumer.lane import Lane
from rsmq.consumer.queue import Queue
from rsmq.consumer.runner import Runner
from rsmq.consumer.settler import Settler
from rsmq.errors import BrokerUnavailable
from rsmq.handler import build_handler
from rsmq.settings import Settings
from rsmq.wire import Wire, pack
from tests.consumer.test_queue import make_lane, make_message
from tests.contract.witness import settled
from tests.patience import until
from tests.servers import Server


class Gate:
    """A settler whose answers wait until the test opens the gate."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.asked: list[str] = []

    def note(self, _lane: Lane) -> None:
        """Nobody settles here."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def answer(*_args: Any, **_more: Any) -> bool:
            self.asked.append(name)
            await self.open.wait()
            return True

        return answer


@asynccontextmanager
async def pool(function: Any, gate: Gate, *, batch: int | None = None, **options: Any) -> AsyncIterator[Runner]:
    """A runner for a handler, on a queue of its own."""
    linger = None if batch is None else timedelta(milliseconds=1)
    handler = build_handler(function, "topic", group="group", batch=batch, linger=linger, **options)
    call: Any = handler.invoke if batch is None else handler.invoke_batch
    runner = build_runner(handler, call, Queue(is_ordered=True), gate, Counter())  # type: ignore[arg-type]
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
async def test_a_lease_that_is_lost_while_an_attempt_is_charged(batch: int | None) -> None:
    """The message counts as running meanwhile, so that a handover waits for it; without the lease it does not start."""
    lane, gate, started = make_lane(), Gate(), list[Any]()

    async def one(_data: bytes, message: Message) -> None:
        started.append(message)

    async def many(_data: list[bytes], messages: list[Message]) -> None:
        started.extend(messages)

    async with pool(one if batch is None else many, gate, batch=batch) as runner:
        runner.queue.offer(lane, [again(lane, 1, 1)])
        await runner.kick()
        await until(lambda: gate.asked == ["start"], "it asks to start")
        assert lane.running == 1
        lane.lease.lose()
        gate.open.set()
        await turns()
        assert (started, lane.running, runner.queue.in_hand) == ([], 0, 0)


async def test_a_failure_counts_as_running_until_it_is_settled() -> None:
    """A handover or a stop waits until the retry is noted: else the next owner would start it at once."""
    lane, gate = make_lane(), Gate()

    async def fails(_data: bytes) -> None:
        raise ValueError

    async with pool(fails, gate) as runner:
        runner.queue.offer(lane, [make_message(lane, 1, 1)])
        await runner.kick()
        await turns()
        assert (gate.asked, lane.running) == (["park"], 1)
        gate.open.set()
        await turns()
        assert lane.running == 0


@pytest.mark.parametrize("batch", [None, 1])
async def test_a_suspect_is_settled_before_the_next_one_starts(batch: int | None) -> None:
    """The next one may end the process; an acknowledgement that waits for company would then be lost with it."""
    lane, gate, started = make_lane(), Gate(), list[bytes]()

    async def one(_data: bytes, message: Message) -> None:
        started.append(message.entry_id)

    async def many(_data: list[bytes], messages: list[Message]) -> None:
        started.extend(message.entry_id for message in messages)

    async with pool(one if batch is None else many, gate, batch=batch) as runner:
        runner.queue.offer(lane, [again(lane, n, n, is_suspect=True) for n in (1, 2)])
        await runner.kick()
        await until(lambda: "start" in gate.asked, "it asks to start")
        first, gate.open = gate.open, asyncio.Event()
        first.set()
        await until(lambda: "settle" in gate.asked, "it settles")
        await turns()
        assert started == [b"1-0"]
        gate.open.set()
        runner.kick_soon()
        await until(lambda: len(started) >= 2, "two have started")
        assert started == [b"1-0", b"2-0"]


async def test_a_linger_leaves_nothing_behind() -> None:
    """A batch that waited in vain for company must not leave its alarm clock in the pool for ever."""
    lane, gate = make_lane(), Gate()

    async def many(_data: list[bytes]) -> None: ...

    async with pool(many, gate, batch=10) as runner:
        for number in range(20):
            runner.queue.offer(lane, [make_message(lane, number, None)])
            await runner.kick()
            await until(lambda: not runner.queue.in_hand, "nothing is in hand")
        await turns()
        assert len(runner._idle) <= len(runner._slots)


def make_fetcher(client: Client, settings: Settings, lanes: dict[int, Lane], queue: Queue) -> Fetcher:
    """A fetcher that has lanes and a queue, and nobody to talk to."""
    nobody: Any = None
    return Fetcher(
        client, settings, "me", "group", lanes, queue, nobody, nobody, nobody, nobody, Counter()
    )  # fmt: skip


async def test_a_late_read_does_not_overtake_the_takeover(client: Client, settings: Settings) -> None:
    """What was read for a lane that is gone is not given to the new lane of the same partition."""
    old, new, queue = make_lane(), make_lane(), Queue(is_ordered=True)
    fetcher = make_fetcher(client, settings, {0: new}, queue)
    reply = [[old.stream.encode(), [[b"9-0", [b"data", b"x", b"key", b"k"]]]]]
    await fetcher._offer(reply, [old])
    assert (queue.in_hand, new.held) == (0, set())
    await fetcher._offer(reply, [new])
    assert (queue.in_hand, new.held) == (1, {b"9-0"})


async def test_the_ghost_of_the_last_connection_is_ended(client: Client, settings: Settings) -> None:
    """A read that is still on its way on the connection before must not be answered into the void."""
    ghost, fetcher = Wire(client), make_fetcher(client, settings, {}, Queue(is_ordered=True))
    await ghost.open()
    fetcher._last_reader = f"{ghost.client_id} {ghost.address}"
    await fetcher._connect()
    with pytest.raises(BrokerUnavailable):
        await ghost.exchange([pack(("PING",))])
    assert fetcher._last_reader == fetcher.reader
    await ghost.close()
    await fetcher._wire.close()


async def test_a_hand_back_that_fails_keeps_nothing_in_hand(
    client: Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes the lane over next, this member included, must find these messages again."""

    async def fails(*_args: Any) -> None:
        raise BrokerUnavailable("away")

    monkeypatch.setattr("rsmq.consumer.settler.HAND_BACK", fails)
    lane = make_lane()
    lane.held = {b"1-0", b"2-0"}
    settler = Settler(client, settings, "me", "group", lambda _lane: None, Counter())
    with pytest.raises(BrokerUnavailable):
        await settler.hand_back(lane, [make_message(lane, 1, 1)])
    assert lane.held == {b"2-0"}


async def test_a_lane_that_cannot_be_settled_harms_no_other(client: Client, settings: Settings) -> None:
    """All lanes travel in one call; when one's lease key is of a foreign type, the others are settled all the same."""
    lost, stats = list[Lane](), Counter[str]()
    settler = Settler(client, settings, "me", "group", lost.append, stats)
    lanes = [make_lane(number, settings.prefix) for number in range(3)]
    for lane in lanes:
        await client.execute_command("XGROUP", "CREATE", lane.stream, "group", "0", "MKSTREAM")
        await client.execute_command("HSET", lane.lease_key, "owner", "me", "epoch", lane.epoch)
        entry_id = await client.execute_command("XADD", lane.stream, "*", "data", "x")
        await client.execute_command("XREADGROUP", "GROUP", "group", "me", "STREAMS", lane.stream, ">")
        lane.held.add(entry_id)
        lane.done.append(entry_id)
        settler.note(lane)
    await client.execute_command("SET", lanes[1].lease_key, "no hash")
    (batch,) = settler.take()
    assert len(batch) == 3
    wire = Wire(client)
    await wire.open()
    (reply,) = await wire.exchange([settler.command(batch)])
    await settler.confirm(batch, reply)
    await wire.close()
    assert lost == [lanes[1]]
    assert [len(lane.held) for lane in lanes] == [0, 1, 0]
    assert stats["refused"] == 1
    await settler.drained([lanes[0], lanes[2]])


async def test_a_settle_that_meets_a_restart_twice_is_sent_again(
    client: Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restarted server has forgotten the script, and dies before it gets it: what was done stays noted."""

    class Fails:
        async def __call__(self, *_args: Any) -> None:
            raise BrokerUnavailable("away again")

    monkeypatch.setattr("rsmq.consumer.settler.SETTLE_MESSAGES", Fails())
    lane = make_lane()
    lane.held, lane.done = {b"1-0"}, [b"1-0"]
    settler = Settler(client, settings, "me", "group", lambda _lane: None, Counter())
    settler.note(lane)
    (batch,) = settler.take()
    assert lane.done == []
    await settler.confirm(batch, NoScriptError("forgotten"))
    assert (lane.done, settler.take() != []) == ([b"1-0"], True)


async def test_a_wait_that_a_failover_brought_back_ends(server: Server, prefix: str) -> None:
    """The lost master had confirmed the start of a retry, the new one still lists its wait: nothing waits for ever."""
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
        await until(lambda: consumer.lanes[0].retry_at == float("inf"), "nobody looks for retries any more")
        ((entry_id, _),) = await broker.client.execute_command("XRANGE", broker.keys.stream("t", 0), "-", "+")
        with server.client() as operator:
            operator.zadd(retry, {entry_id + b"|1": 1})  # what was lost with the master
            reader, _, _ = operator.hget(broker.keys.lease("t", 0, "g"), "reader").partition(b" ")
            operator.client_kill_filter(_id=reader.decode())  # its connection ended with it
        await settled(broker, "t")
