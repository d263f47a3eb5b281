"""`broker.reschedule`: what waits for a time gets another one; what does not is refused, with what to do instead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rsmq import Broker, Cancelled, ConfigError, Message, Settings
from rsmq.consumer.running.runner import Runner
from rsmq.consumer.waiting.lane import Lane
from rsmq.errors import BrokerUnavailable
from rsmq.model.clock import awake, now_ms
from rsmq.model.message_ref import MessageRef
from rsmq.redis.scripts import MOVE_PARKED
from tests.contract.witness import ask
from tests.control.test_cancel import LATER, STYLES, Work, is_state, state_of
from tests.patience import until

pytestmark = pytest.mark.usefixtures("no_task_left")

BY_KEY: list[dict[str, Any]] = [{}, {"ordering": "partition"}, {"batch": 5}]
styles = pytest.mark.parametrize(
    "options", [*STYLES, {"ordering": "partition"}], ids=["key", "none", "shared", "batch", "partition"]
)
AT = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """A broker with a prefix of its own."""
    return Broker(replace(settings, preflight="warn", partitions=1))


class Recovering(Work):
    """The first attempt of each message fails, the second one succeeds."""

    async def one(self, message: Message) -> None:
        """Counts."""
        self.began[message.id] += 1
        assert message.attempt == self.began[message.id]
        if self.began[message.id] == 1 and message.data == b"fail":
            raise OSError("out of paper")
        self.done[message.id] += 1


async def park(broker: Broker, payload: str = "fail", key: str = "ada") -> MessageRef:
    """A message whose first attempt has failed: its next one is in an hour."""
    ref = await broker.publish("in", payload, key=key)
    await until(lambda: is_state(broker, ref, "waiting_for_retry"), "it is parked")
    return ref


@styles
async def test_parked_message_that_is_due_earlier_is_tried_at_once(broker: Broker, options: dict[str, Any]) -> None:
    """Without the hour that is left, as the next attempt; the one behind its key follows."""
    work = Recovering()
    work.register(broker, options)
    async with broker.running():
        ref = await park(broker)
        behind = await broker.publish("in", "x", key="ada")
        assert await broker.reschedule(ref, at=AT) == AT
        assert await broker.reschedule(ref, at=AT) == AT  # again, as after a lost answer
        status = (await broker.look(ref)).group("g")
        assert status is not None
        assert (status.state, status.due, status.attempt) == ("waiting_for_retry", AT, 1)
        due = await broker.reschedule(str(ref), topic="in", delay="0s", group="g")
        assert due <= datetime.now(UTC) + timedelta(seconds=30)
        for each in (ref, behind):
            await until(lambda each=each: is_state(broker, each, "settled"), "it is settled")  # type: ignore[misc]
        assert await ask(broker, "HLEN", broker.keys.cancels("in", 0, "g")) == 0
        assert broker.worker
        queue = broker.worker.consumers[0].queue
        assert queue.in_flight == queue.blocked == 0
    assert work.began == {ref: 2, behind: 1}


@pytest.mark.parametrize("options", BY_KEY, ids=["key", "partition", "batch"])
async def test_parked_message_that_is_moved_does_not_start_at_the_old_time(
    broker: Broker, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its member has stopped the timer of the old time before the answer."""
    timers = list[Callable[[], None]]()
    work = Recovering()
    work.register(broker, options)
    async with broker.running():
        assert broker.worker
        runner = broker.worker.consumers[0].pool

        def keep(_: Runner, message: Message, lane: Lane, __: float, charge: int = 1) -> None:
            timers.append(lambda: Runner._resume(runner, message, lane, charge))  # type: ignore[arg-type]

        monkeypatch.setattr(Runner, "resume_later", keep)
        ref = await park(broker)
        assert await broker.reschedule(ref, at=AT) == AT
        assert len(timers) == 2
        timers[0]()
        assert runner.queue.blocked == 1  # it still waits
        timers[1]()
        assert runner.queue.blocked == 0
        await until(lambda: is_state(broker, ref, "settled"), "it is settled")
    assert work.began == {ref: 2}


@styles
async def test_parked_message_without_a_worker_is_moved_by_the_call(broker: Broker, options: dict[str, Any]) -> None:
    """The worker that comes next takes it at the new time."""
    work = Recovering()
    work.register(broker, options)
    async with broker.running():
        ref = await park(broker)
    async with broker:
        assert await broker.reschedule(ref, at=AT) == AT
        assert await broker.reschedule(ref, delay="0s") < AT
    async with broker.running():
        await until(lambda: is_state(broker, ref, "settled"), "it is settled")
    assert work.began == {ref: 2}


async def test_paused_owner_of_a_moved_message_can_not_start_it(broker: Broker) -> None:
    """Its lease has run out, so the call moves the message itself, and raises the epoch."""
    async with broker:
        stream, lease = broker.keys.stream("in", 0), broker.keys.lease("in", 0, "g")
        ref = await broker.publish("in", "x", key="ada")
        await ask(broker, "XGROUP", "CREATE", stream, "g", "0")
        ((_, ((entry_id, _),)),) = await ask(broker, "XREADGROUP", "GROUP", "g", "me", "STREAMS", stream, ">")
        await ask(broker, "ZADD", broker.keys.retry("in", 0, "g"), 5, entry_id + b"|1")
        await ask(broker, "HSET", lease, "owner", "me", "epoch", "7", "until_ms", str(now_ms() - 1000))
        assert await broker.reschedule(ref, at=AT) == AT
        assert await ask(broker, "HMGET", lease, "owner", "epoch") == [b"", b"8"]
        names = [
            stream,
            lease,
            broker.keys.retry("in", 0, "g"),
            broker.keys.cancels("in", 0, "g"),
            broker.keys.errors("in", 0, "g"),
        ]
        assert await MOVE_PARKED(broker.client, names, ("me", "7", "g", entry_id)) == [b"STALE_EPOCH"]


async def test_lost_reply_to_the_owner_leaves_the_timer_stopped_until_it_knows(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has taken the new time. The owner asks again, and starts the message then."""
    work = Recovering()
    work.register(broker, {})
    calls = 0
    async with broker.running():
        ref = await park(broker)
        assert broker.worker
        settler = broker.worker.consumers[0].settler
        original = settler.ask

        async def lose(script: Any, keys: Any, args: Any) -> Any:
            nonlocal calls
            reply = await original(script, keys, args)
            if script is MOVE_PARKED:
                calls += 1
                if calls == 1:
                    raise BrokerUnavailable("the reply is lost")
            return reply

        monkeypatch.setattr(settler, "ask", lose)
        await broker.reschedule(ref, delay="0s")
        await until(lambda: is_state(broker, ref, "settled"), "it is settled")
    assert calls > 1
    assert work.began == {ref: 2}


async def test_owner_that_does_not_answer_moves_nothing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a lease the mark is taken back, so that the message does not move later either."""
    broker = Broker(replace(settings, preflight="warn", partitions=1, lease_ttl=timedelta(seconds=1)))
    work = Recovering()
    work.register(broker, {})
    async with broker.running():
        ref = await park(broker)
        before = (await broker.look(ref)).group("g")
        monkeypatch.setattr("rsmq.consumer.reading.moves.Moves.look_at", lambda *_: asyncio.sleep(0))
        began = awake()
        with pytest.raises(ConfigError, match=r"g: running.*raise Retry"):
            await broker.reschedule(ref, at=AT)
        assert awake() > began
        assert await ask(broker, "HLEN", broker.keys.cancels("in", 0, "g")) == 0
        assert (await broker.look(ref)).group("g") == before


async def test_what_waits_for_no_time_is_refused_with_what_to_do(broker: Broker) -> None:
    """Undelivered, running, waiting behind its key, settled, dead and cancelled messages stay what they are."""
    work = Work()
    work.register(broker, {"concurrency": 2})
    broker.handler("in", group="slow", retry=LATER)(work.one)
    async with broker.running():
        await broker.pause_group("in", "slow")
        assert broker.worker
        slow = next(each for each in broker.worker.consumers if each.handler.group == "slow")
        await until(lambda: asyncio.sleep(0, slow.fetchers.is_paused), "it is paused")
        done = await broker.publish("in", "x", key="a")
        await until(lambda: is_state(broker, done, "settled"), "it is settled")
        running = await broker.publish("in", "wait", key="b")
        await until(lambda: is_state(broker, running, "running"), "it runs")
        waiting = await broker.publish("in", "x", key="b")
        await until(lambda: is_state(broker, waiting, "waiting_for_key"), "it waits behind its key")
        for ref, word, advice in (
            (done, "settled", "publish it again"), (running, "running", "Retry"), (waiting, "running", "Retry"),
        ):  # fmt: skip
            state = await state_of(broker, ref)
            with pytest.raises(ConfigError, match=rf"\(g: {word}\).*{advice}"):
                await broker.reschedule(ref, at=AT, group="g")
            with pytest.raises(ConfigError, match=r"slow: unread\).*cancel it"):
                await broker.reschedule(ref, at=AT)
            assert await state_of(broker, ref) == state
        assert isinstance(await broker.cancel(waiting, group="g"), Cancelled)
        with pytest.raises(ConfigError, match=r"\(g: cancelled\): publish it again"):
            await broker.reschedule(waiting, at=AT, group="g")
        with pytest.raises(ConfigError, match="has no group 'h'"):
            await broker.reschedule(done, at=AT, group="h")
        work.go_on.set()


async def test_message_that_is_parked_for_one_group_is_moved_for_that_one(broker: Broker) -> None:
    """The other group has settled it, and stays so. A delayed message is moved for all groups only."""
    work, other = Recovering(), Work()
    work.register(broker, {})

    async def audit(message: Message) -> None:
        other.done[message.id] += 1

    broker.handler("in", group="audit")(audit)
    async with broker.running():
        ref = await park(broker)
        await until(lambda: is_state(broker, ref, "settled", "audit"), "the other group has settled it")
        assert await broker.reschedule(ref, at=AT) == AT
        await broker.reschedule(ref, delay="0s")
        await until(lambda: is_state(broker, ref, "settled"), "it is settled")
        delayed = await broker.publish("in", "x", delay="1h")
        with pytest.raises(ConfigError, match="reschedule it for all groups"):
            await broker.reschedule(delayed, at=AT, group="g")
    assert other.done[ref] == 1


@pytest.mark.parametrize("moment", ["delayed", "parked"])
async def test_message_is_not_moved_beyond_its_expiry(broker: Broker, moment: str) -> None:
    """It would end without an attempt, and without a word: publishing it so is refused, too."""
    work = Recovering()
    work.register(broker, {})
    delay = {"delay": "1h"} if moment == "delayed" else {}
    async with broker.running():
        ref = await broker.publish("in", "fail", key="ada", expires="2h", **delay)  # type: ignore[arg-type]
        wanted = "delayed" if moment == "delayed" else "waiting_for_retry"
        await until(lambda: is_state(broker, ref, wanted), "it waits")
        before = (await broker.look(ref)).due
        for late in ({"delay": "3h"}, {"at": AT}):
            with pytest.raises(ConfigError, match="which is not after its new due time: it would never be handled"):
                await broker.reschedule(ref, **late)  # type: ignore[arg-type]
        assert (await broker.look(ref)).due == before
        await broker.reschedule(ref, delay="90m")
        await broker.reschedule(ref, delay="0s")
        await until(lambda: work.began[ref] >= 1, "it is handled")
