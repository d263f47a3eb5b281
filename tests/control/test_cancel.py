"""`broker.cancel`: a message in any state is either cancelled or handled, and the answer says which."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tenacity import wait_fixed

from rsmq import Broker, Cancelled, ConfigError, Message, Rate, RetryPolicy, Running, Settings, Settled, Unknown
from rsmq.errors import ResultFailed, ResultTimeout
from rsmq.model.message import new_message_id
from rsmq.model.message_ref import MessageRef
from rsmq.redis.scripts import CANCEL_UNREAD
from rsmq.telemetry.metric import CANCELLED
from rsmq.telemetry.worker_metrics import WorkerMetrics
from rsmq.worker.retention import Retention
from tests.contract.witness import ask
from tests.patience import until

pytestmark = pytest.mark.usefixtures("no_task_left")

LATER = RetryPolicy(max_attempts=3, wait=wait_fixed(3600))
STYLES: list[dict[str, Any]] = [{}, {"ordering": "none"}, {"distribution": "shared"}, {"batch": 5}]
styles = pytest.mark.parametrize("options", STYLES, ids=["key", "none", "shared", "batch"])


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """A broker with a prefix of its own."""
    return Broker(replace(settings, preflight="warn", partitions=1))


class Work:
    """What the handlers did: how often each message began, and which of them have ended well."""

    def __init__(self) -> None:
        self.began: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.go_on = asyncio.Event()

    async def one(self, message: Message) -> None:
        """Waits for `go_on`, or fails, as the payload says."""
        self.began[message.id] += 1
        if message.data == b"fail":
            raise OSError("out of paper")
        if message.data == b"wait":
            await self.go_on.wait()
        if message.data == b"wait and fail":
            await self.go_on.wait()
            raise OSError("out of paper")
        self.done[message.id] += 1

    def register(self, broker: Broker, options: dict[str, Any]) -> None:
        """As the handler of `in`, single or batch."""

        async def each_of(messages: list[Message]) -> list[Any]:
            return list(await asyncio.gather(*map(self.one, messages), return_exceptions=True))

        broker.handler("in", group="g", retry=LATER, **options)(each_of if "batch" in options else self.one)


async def state_of(broker: Broker, ref: MessageRef, group: str = "g") -> str:
    """Where a message is."""
    status = await broker.look(ref)
    found = status.group(group)
    return found.state if found else status.state


async def is_state(broker: Broker, ref: MessageRef, state: str, group: str = "g") -> bool:
    """Whether it is there."""
    return await state_of(broker, ref, group) == state


async def marks(broker: Broker) -> int:
    """Marks that no owner has met."""
    return int(await ask(broker, "HLEN", broker.keys.cancels("in", 0, "g")))


async def test_delayed_message_is_cancelled_once_and_for_all(broker: Broker) -> None:
    """A second call answers the same, and a publish that is sent again does not bring it back."""
    async with broker:
        ref = await broker.publish("in", "x", delay="1h", message_id="sms-1")
        assert isinstance(await broker.cancel(ref), Cancelled)
        assert isinstance(await broker.cancel("sms-1", topic="in"), Cancelled)
        await broker.publish("in", "x", delay="1h", message_id="sms-1")
        assert (await broker.look(ref)).state == "cancelled"
        assert await ask(broker, "ZCARD", broker.keys.delayed("in", 0)) == 0
        assert isinstance(await broker.cancel(new_message_id(), topic="in"), Unknown)


async def test_delayed_message_that_is_cancelled_has_a_result_that_says_so(broker: Broker) -> None:
    """In each group; one that asked to keep none has none."""
    async with broker:
        kept = await broker.publish("in", "x", delay="1h", keep_result="1h")
        other = await broker.publish("in", "x", delay="1h")
        for group in ("g", "h"):
            await ask(broker, "XGROUP", "CREATE", broker.keys.stream("in", 0), group, "0", "MKSTREAM")
        await broker.cancel(kept)
        await broker.cancel(other)
        for group in ("g", "h"):
            with pytest.raises(ResultFailed) as failed:
                await broker.result(kept, group=group, timeout="0s")
            assert failed.value.reason == "cancelled"
        with pytest.raises(ResultTimeout):
            await broker.result(other, group="g", timeout="0s")


@pytest.mark.parametrize("key", [None, "ada"])
async def test_every_cancelled_message_is_counted_once(broker: Broker, key: str | None) -> None:
    """By its owner, or by the call that has settled it: delayed ones, which no group has, and parked ones. Asking
    twice counts nothing."""
    work = Work()
    work.register(broker, {})
    count = lambda: {  # noqa: E731
        each.labels: each.value for each in WorkerMetrics(broker).read() if each.metric is CANCELLED and each.value
    }
    async with broker.running():
        parked = await broker.publish("in", "fail", key=key)
        await until(lambda: is_parked(broker, parked), "it is parked")
        late = await broker.publish("in", "fail", delay="1h")
        for _ in range(2):
            assert isinstance(await broker.cancel(parked), Cancelled)
            assert isinstance(await broker.cancel(late), Cancelled)
        await until(lambda: asyncio.sleep(0, count() == {("in", "g"): 1, ("in", ""): 1}), f"each is counted: {count()}")


async def is_parked(broker: Broker, ref: MessageRef) -> bool:
    """Whether it waits for its retry."""
    status = (await broker.look(ref)).group("g")
    return status is not None and status.state == "waiting_for_retry"


async def test_delayed_message_is_rescheduled(broker: Broker) -> None:
    """It is there once, at the new time, also if the call is repeated; what is not delayed cannot be moved."""
    async with broker:
        ref = await broker.publish("in", "x", delay="1h")
        at = datetime(2100, 1, 1, tzinfo=UTC)
        for _ in range(2):
            assert await broker.reschedule(ref, at=at) == at
        assert (await broker.look(ref)).due == at
        assert await ask(broker, "ZCARD", broker.keys.delayed("in", 0)) == 1
        assert await broker.reschedule(str(ref), topic="in", delay="5m") < at
        assert isinstance(await broker.cancel(ref), Cancelled)
        for gone in (ref, await broker.publish("in", "x"), new_message_id()):
            with pytest.raises(ConfigError, match="neither delayed nor waits for a retry"):
                await broker.reschedule(gone, topic="in", at=at)
        with pytest.raises(ConfigError, match="give at or delay"):
            await broker.reschedule(ref)


@styles
async def test_undelivered_message_is_cancelled(broker: Broker, options: dict[str, Any]) -> None:
    """Those around it are handled, in order; a second call answers the same before and after the worker has met it."""
    work = Work()
    async with broker:
        refs = [await broker.publish("in", "x", key="ada") for _ in range(5)]
        await ask(broker, "XGROUP", "CREATE", broker.keys.stream("in", 0), "g", "0")
        for ref in refs[1:4]:
            for _ in range(2):
                assert await broker.cancel(ref) == Cancelled({"g": "cancelled"})
            assert await is_state(broker, ref, "cancelled")
    work.register(broker, options)
    async with broker.running():
        await until(lambda: is_state(broker, refs[4], "settled"), "the last one is settled")
        await until(lambda: is_state(broker, refs[0], "settled"), "and the first one")
        for ref in refs[1:4]:
            await until(lambda ref=ref: is_state(broker, ref, "cancelled"), "it is cancelled")  # type: ignore[misc]
            assert await broker.cancel(ref) == Cancelled({"g": "cancelled"})
        await until(lambda: no_marks(broker), "the worker has met the marks")
        assert broker.worker
        assert broker.worker.consumers[0].stats["cancelled"] == 3
    assert list(work.began) == [refs[0], refs[4]]
    assert await_nothing(work)


async def no_marks(broker: Broker) -> bool:
    """Whether every mark was met."""
    return await marks(broker) == 0


def await_nothing(work: Work) -> bool:
    """Each message that began was handled once."""
    return work.began == work.done


@styles
async def test_message_in_the_hands_of_a_member_is_cancelled(broker: Broker, options: dict[str, Any]) -> None:
    """It waits behind another one of its key, or for a free task; those behind it are handled."""
    work = Work()
    is_ordered = options in ({}, {"batch": 5})
    work.register(broker, {**options, "concurrency": 1})
    async with broker.running():
        first = await broker.publish("in", "wait", key="ada")
        await until(lambda: asyncio.sleep(0, first in work.began), "the first one runs")
        rest = [await broker.publish("in", "x", key="ada") for _ in range(3)]
        for ref in rest:
            await until(lambda ref=ref: delivered(broker, ref), "it is delivered")  # type: ignore[misc]
        assert await broker.cancel(rest[1]) == Cancelled({"g": "cancelled"})
        assert await is_state(broker, rest[1], "cancelled")
        assert await state_of(broker, rest[2]) == ("waiting_for_key" if is_ordered else await state_of(broker, rest[2]))
        work.go_on.set()
        for ref in (first, rest[0], rest[2]):
            await until(lambda ref=ref: is_state(broker, ref, "settled"), "it is settled")  # type: ignore[misc]
        assert isinstance(await broker.cancel(first), Settled)
        assert isinstance(await broker.cancel(rest[1]), Cancelled)
    assert list(work.done) == [first, rest[0], rest[2]]


async def delivered(broker: Broker, ref: MessageRef) -> bool:
    """Whether a member has it."""
    return await state_of(broker, ref) != "unread"


@styles
async def test_running_message_goes_on_but_is_not_tried_again(broker: Broker, options: dict[str, Any]) -> None:
    """The answer says that it runs. One succeeds, and is settled; the other fails, and is cancelled."""
    work = Work()
    work.register(broker, options)
    async with broker.running():
        good, bad = [await broker.publish("in", each, key=each) for each in ("wait", "wait and fail")]
        await until(lambda: asyncio.sleep(0, {good, bad} <= work.began.keys()), "both run")
        for ref in (good, bad):
            for _ in range(2):
                assert await broker.cancel(ref) == Running({"g": "running"})
        work.go_on.set()
        await until(lambda: is_state(broker, good, "settled"), "it is settled")
        await until(lambda: is_state(broker, bad, "cancelled"), "it is cancelled")
        assert isinstance(await broker.cancel(good), Settled)
        assert isinstance(await broker.cancel(bad), Cancelled)
    assert work.began == {good: 1, bad: 1}


@styles
async def test_running_handler_is_cancelled_if_asked_for(broker: Broker, options: dict[str, Any]) -> None:
    """The message counts as cancelled, not as failed. Others in its batch are handled again."""
    work = Work()
    work.register(broker, options)
    async with broker.running():
        refs = [await broker.publish("in", "wait", key=f"k{n}") for n in range(3)]
        await until(lambda: asyncio.sleep(0, set(refs) <= work.began.keys()), "all run")
        assert await broker.cancel(refs[1], running=True) == Cancelled({"g": "cancelled"})
        work.go_on.set()
        for ref in (refs[0], refs[2]):
            await until(lambda ref=ref: is_state(broker, ref, "settled"), "it is settled")  # type: ignore[misc]
        assert await is_state(broker, refs[1], "cancelled")
    assert work.done.keys() == {refs[0], refs[2]}


@styles
async def test_parked_message_is_cancelled(broker: Broker, options: dict[str, Any]) -> None:
    """And if it holds its key, the next one of its key starts at once."""
    work = Work()
    work.register(broker, options)
    async with broker.running():
        ref = await broker.publish("in", "fail", key="ada")
        await until(lambda: is_state(broker, ref, "waiting_for_retry"), "it is parked")
        behind = await broker.publish("in", "x", key="ada")
        assert await broker.cancel(ref) == Cancelled({"g": "cancelled"})
        await until(lambda: is_state(broker, behind, "settled"), "the one behind it is settled")
        await until(lambda: no_marks(broker), "its owner has met the mark")
        assert await is_state(broker, ref, "cancelled")
        assert broker.worker
        assert broker.worker.consumers[0].queue.in_flight == broker.worker.consumers[0].queue.blocked == 0
    assert work.began == {ref: 1, behind: 1}


async def test_message_that_its_rate_holds_back_is_cancelled(broker: Broker) -> None:
    """The first of its key, and one behind it; the others go on when the rate has room."""
    work = Work()
    work.register(broker, {"rate": Rate(1, per=timedelta(hours=1), by="key")})
    async with broker.running():
        refs = [await broker.publish("in", "x", key="ada") for _ in range(4)]
        await until(lambda: is_state(broker, refs[0], "settled"), "the first one is handled")
        assert broker.worker
        queue = broker.worker.consumers[0].queue
        await until(lambda: asyncio.sleep(0, queue.held == 3), "the others are held back")
        for ref in (refs[1], refs[2]):
            assert await broker.cancel(ref) == Cancelled({"g": "cancelled"})
        await until(lambda: asyncio.sleep(0, queue.held == 1), "the last one is held back")
        assert (queue.in_flight, queue.blocked) == (0, 1)
    assert work.done == {refs[0]: 1}


async def test_cancelled_message_stays_cancelled_when_its_group_is_reset(broker: Broker) -> None:
    """The group handles all others again."""
    work = Work()
    work.register(broker, {})
    async with broker:
        await ask(broker, "XGROUP", "CREATE", broker.keys.stream("in", 0), "g", "0", "MKSTREAM")
        first, gone, last = [await broker.publish("in", "x", key="ada") for _ in range(3)]
        await broker.cancel(gone)
        async with broker.running():
            await until(lambda: is_state(broker, last, "settled"), "all are settled")
            await until(lambda: no_marks(broker), "the mark is met")
            await broker.reset_group("in", "g", "earliest")
            await until(lambda: asyncio.sleep(0, work.done[last] >= 2), "the last one is handled again")
            await until(lambda: no_marks(broker), "the mark is met again")
            assert await is_state(broker, gone, "cancelled")
    # at least twice: what the worker read before it learned of the reset is handled once more
    assert work.done.keys() == {first, last}
    assert min(work.done.values()) >= 2


async def test_one_of_several_groups(broker: Broker) -> None:
    """A message can be cancelled for one group; a delayed one only for all."""
    async with broker:
        ref = await broker.publish("in", "x")
        for group in ("a", "b"):
            await ask(broker, "XGROUP", "CREATE", broker.keys.stream("in", 0), group, "0")
        assert await broker.cancel(ref, group="a") == Cancelled({"a": "cancelled"})
        assert (await state_of(broker, ref, "a"), await state_of(broker, ref, "b")) == ("cancelled", "unread")
        assert await broker.cancel(ref) == Cancelled({"a": "cancelled", "b": "cancelled"})
        with pytest.raises(ConfigError, match="has no group 'c'"):
            await broker.cancel(ref, group="c")
        delayed = await broker.publish("in", "x", delay=timedelta(hours=1))
        with pytest.raises(ConfigError, match="cancel it for all groups"):
            await broker.cancel(delayed, group="a")


@pytest.mark.parametrize("by", ["ref", "stream id"])
async def test_message_that_is_cancelled_before_any_group_exists_is_never_handled(broker: Broker, by: str) -> None:
    """It is removed for all groups that come; a second call answers the same, and its unique name is free."""
    work = Work()
    work.register(broker, {})
    async with broker:
        ref = await broker.publish("in", "x", key="ada", unique="u")
        other = await broker.publish("in", "y", key="ada")
        found = (await broker.look(ref)).stream_id
        named: dict[str, Any] = {"topic": "in", "key": "ada"} if by == "stream id" else {}
        for _ in range(2):
            assert await broker.cancel(found if by == "stream id" and found else ref, **named) == Cancelled({})
        assert (await broker.look(ref)).state == "cancelled"
        assert (await broker.publish("in", "z", key="ada", unique="u")).is_new
        async with broker.running():
            await until(lambda: is_state(broker, other, "settled"), "the other one is handled")
        assert ref not in work.began
        assert await ask(broker, "HGET", broker.keys.removed("in", 0), "own") == b"1"


async def test_message_waits_for_its_cancelling_when_a_group_comes_meanwhile(broker: Broker) -> None:
    """The script leaves it to the marks of that group."""
    async with broker:
        ref = await broker.publish("in", "x")
        found = (await broker.look(ref)).stream_id
        assert found is not None
        await ask(broker, "XGROUP", "CREATE", broker.keys.stream("in", 0), "g", "0")
        names = (broker.keys.stream("in", 0), *(broker.keys.dedup("in", 0, each) for each in (ref, found)))
        assert await CANCEL_UNREAD(broker.client, (*names, broker.keys.removed("in", 0)), (found, 1000)) == b"GROUPS"
        assert await broker.cancel(ref) == Cancelled({"g": "cancelled"})


async def test_group_that_is_added_later_handles_what_was_cancelled_for_the_others(broker: Broker) -> None:
    """It begins with the earliest message by default; one that begins with the latest does not."""
    handled = list[str]()
    for name, start in (("g", "earliest"), ("later", "earliest"), ("latest", "latest")):

        @broker.handler("in", group=name, start=start)
        async def handle(payload: str, message: Message) -> None:
            handled.append(message.group)

    async with broker:
        await ask(broker, "XGROUP", "CREATE", broker.keys.stream("in", 0), "g", "0", "MKSTREAM")
        await broker.topics.ensure("in", 1)
        assert await broker.cancel(await broker.publish("in", "x")) == Cancelled({"g": "cancelled"})
        async with broker.running():
            last = await broker.publish("in", "y")
            await until(lambda: is_state(broker, last, "settled", "latest"), "all of them read")
            await until(lambda: len(handled) == 4, "each has handled what it gets")
    assert sorted(handled) == ["g", "later", "later", "latest"]


async def test_marks_are_forgotten_with_their_message(broker: Broker) -> None:
    """As retention removes the entries."""
    work = Work()
    work.register(broker, {})
    async with broker.running():
        ref = await broker.publish("in", "fail", key="ada")
        await until(lambda: is_state(broker, ref, "waiting_for_retry"), "it is parked")
        await broker.cancel(ref)
        await until(lambda: no_marks(broker), "the mark is met")
        names = [part("in", 0, "g") for part in (broker.keys.errors, broker.keys.cancelled)]
        assert [await ask(broker, "EXISTS", name) for name in names] == [1, 1]
        await ask(broker, "XTRIM", broker.keys.stream("in", 0), "MAXLEN", 0)
        last = await broker.publish("in", "x", key="ada")
        await until(lambda: is_state(broker, last, "settled"), "a later one is there")
        assert broker.worker
        about = (broker.client, broker.keys, broker.settings, broker.topics, broker.worker.consumers)
        await Retention(*about).tidy()
        assert [await ask(broker, "EXISTS", name) for name in names] == [0, 0]
