"""Batches: each way in which a message ends counts its member, and the callback comes once, after the last of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from tenacity import wait_fixed

from rsmq import (
    BatchEnded,
    BatchExists,
    Broker,
    ConfigError,
    Fallback,
    Message,
    MessageRef,
    PublishUnknown,
    Rate,
    Reject,
    RetryPolicy,
    Settings,
)
from rsmq.codecs import Zstd
from rsmq.control import Batches, BatchStatus
from rsmq.producer.producer import MemberOnWay
from rsmq.redis.streams import ensure_groups
from rsmq.worker.batch_ends import BatchEnds
from rsmq.worker.retention import Retention
from tests.contract.witness import ask, settled
from tests.patience import until
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("no_task_left")

SOON = RetryPolicy(max_attempts=2, wait=wait_fixed(0.01))
LATER = RetryPolicy(max_attempts=3, wait=wait_fixed(3600))
STYLES: list[dict[str, Any]] = [{}, {"ordering": "none"}, {"distribution": "shared"}, {"batch": 5}]
styles = pytest.mark.parametrize("options", STYLES, ids=["key", "none", "shared", "batch"])
Call = Callable[[Message], Coroutine[Any, Any, None]]


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """A broker with a prefix of its own."""
    return Broker(replace(settings, preflight="warn", partitions=2))


class Callbacks:
    """What the callback topics have got."""

    def __init__(self, broker: Broker) -> None:
        self.all: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        for topic in ("reports", "successes"):
            broker.handler(topic, group="r")(self.note)

    async def note(self, payload: dict[str, Any], message: Message) -> None:
        """One callback."""
        self.all.append(payload)
        self.keys.append(message.key)

    @property
    def states(self) -> list[str]:
        """What they have said, in order."""
        return sorted(each["state"] for each in self.all)

    async def come(self, *states: str) -> None:
        """Wait for these, and for no others."""
        await until(lambda: len(self.all) >= len(states), f"callbacks {states}, got {self.all}")
        assert self.states == sorted(states)


def serve(
    broker: Broker, call: Call, options: dict[str, Any] | None = None, *, topic: str = "sms", **more: Any
) -> None:
    """A handler of the group that handles members, single or batch."""
    options = {"retry": SOON, **(options or {}), **more}

    async def many(messages: list[Message]) -> list[Any]:
        return list(await asyncio.gather(*map(call, messages), return_exceptions=True))

    broker.handler(topic, group="sender", **options)(many if "batch" in options else call)


async def works(message: Message) -> None:
    """Fails if the payload says so."""
    if message.data == b"fail":
        raise OSError("out of paper")
    if message.data == b"reject":
        raise Reject("no such number")


def opened(broker: Broker, name: str = "campaign", **options: Any) -> Any:
    """A batch with both callbacks."""
    about = {"group": "sender", "on_complete": "reports", "on_success": "successes", **options}
    return broker.batch(name, **about)


async def status(broker: Broker, name: str = "campaign") -> BatchStatus:
    """A batch that is there."""
    found = await broker.find_batch(name)
    assert found is not None
    return found


def numbers(found: BatchStatus | dict[str, Any]) -> list[int]:
    """Total, done, failed, cancelled, expired, missing."""
    names = ("total", "done", "failed", "cancelled", "expired", "missing")
    return [found[name] if isinstance(found, dict) else getattr(found, name) for name in names]


@styles
async def test_the_callback_comes_once_with_the_numbers_of_all_ends(broker: Broker, options: dict[str, Any]) -> None:
    """Done, failed, rejected and expired members count; other messages of the topic do not."""
    calls = Callbacks(broker)
    serve(broker, works, options)
    async with broker.running():
        await broker.publish("sms", "stranger", key="a")
        async with opened(broker) as batch:
            for payload in ("1", "2", "fail", "reject"):
                await batch.publish("sms", payload, key="a")
            past = datetime(2020, 1, 1, tzinfo=UTC)
            await batch.publish("sms", "late", expires=past)
            await batch.publish("sms", "late", expires=past, on_expiry="dead")
            assert not calls.all
        await calls.come("complete")
        found = await status(broker)
        await settled(broker, "sms")
    assert numbers(calls.all[0]) == [6, 2, 2, 0, 2, 0] == numbers(found)
    assert calls.all[0]["batch"] == "campaign" == calls.keys[0]
    assert found.state == "complete"
    assert found.topics == ("sms",)
    assert found.ended is not None


async def test_a_batch_of_done_members_calls_both_topics(broker: Broker) -> None:
    """Also one without members, at once."""
    calls = Callbacks(broker)
    serve(broker, works)
    async with broker.running():
        async with opened(broker) as batch:
            await asyncio.gather(*[batch.publish("sms", "1") for _ in range(1200)])
        async with opened(broker, "empty"):
            pass
        await calls.come("complete", "success", "complete", "success")
        assert (await status(broker)).state == "success"
    assert sorted(each["total"] for each in calls.all) == [0, 0, 1200, 1200]


async def test_no_callback_comes_before_the_batch_is_closed(broker: Broker) -> None:
    """All members have left before; the callback comes with the end of the block."""
    calls = Callbacks(broker)
    serve(broker, works)
    async with broker.running():
        async with opened(broker) as batch:
            await batch.publish("sms", "1")
            await settled(broker, "sms")
            assert (await status(broker)).state == "open"
            assert not calls.all
        await calls.come("complete", "success")


@styles
async def test_cancelled_members_count(broker: Broker, options: dict[str, Any]) -> None:
    """One that is delayed, one that waits for its retry, and one that is unread."""
    calls = Callbacks(broker)
    serve(broker, works, {**options, "retry": LATER})
    async with broker.running():
        async with opened(broker) as batch:
            delayed = await batch.publish("sms", "1", delay="1h")
            parked = await batch.publish("sms", "fail", key="k")
        await until(lambda: is_parked(broker, parked), "it waits for its retry")
        await broker.cancel(delayed)
        await broker.cancel(parked)
        await calls.come("complete")
    assert numbers(calls.all[0]) == [2, 0, 0, 2, 0, 0]


async def is_parked(broker: Broker, ref: Any) -> bool:
    """Whether a message waits for its retry."""
    found = (await broker.look(ref)).group("sender")
    return found is not None and found.state == "waiting_for_retry"


@styles
async def test_cancel_batch_ends_all_members_that_have_not_started(broker: Broker, options: dict[str, Any]) -> None:
    """Unread, waiting for a retry, behind it, and delayed ones; the one that runs goes on."""
    calls, go_on = Callbacks(broker), asyncio.Event()

    async def call(message: Message) -> None:
        if message.data == b"wait":
            await go_on.wait()
        await works(message)

    serve(broker, call, {**options, "retry": LATER})
    async with broker.running():
        async with opened(broker) as batch:
            parked = await batch.publish("sms", "fail", key="k")
            await until(lambda: is_parked(broker, parked), "it waits for its retry")
            await batch.publish("sms", "behind", key="k")
            await batch.publish("sms", "delayed", delay="300ms")
        found = await broker.cancel_batch("campaign")
        assert found is not None
        assert found.state in ("cancelled", "complete")
        go_on.set()
        with suppress(ConfigError):  # with key order its owner has met the mark already
            await broker.reschedule(parked, delay="1ms")
        await calls.come("complete")
        counted = numbers(calls.all[0])
        assert (counted[0], counted[5]) == (3, 0)
        assert counted[3] >= 2
        async with opened(broker, "other") as batch:  # its members are not cancelled
            await batch.publish("sms", "1", key="k")
        await until(lambda: len(calls.all) == 3, "the other batch calls")


async def test_a_cancelled_batch_takes_no_more_members(broker: Broker) -> None:
    """Its publisher learns that with its next page; its mark goes when the batch would have been forgotten."""
    calls = Callbacks(broker)
    serve(broker, works)
    async with broker.running():

        async def block1() -> None:
            async with opened(broker, expires="1h", keep="1ms") as batch:
                await batch.publish("sms", "1")
                await settled(broker, "sms")
                await broker.cancel_batch("campaign")
                await batch.publish("sms", "2")

        with pytest.raises(BatchEnded, match="takes no more members"):
            await block1()
        await settled(broker, "sms")
        mark = broker.keys.cancels("sms", 0, "sender")
        assert await ask(broker, "HLEN", mark) == 1
        (field,) = await ask(broker, "HKEYS", mark)
        await ask(broker, "HSET", mark, field, 1)
        assert broker.worker is not None
        retention = Retention(broker.client, broker.keys, broker.settings, broker.topics, broker.worker.consumers)
        await retention.tidy()
        assert await ask(broker, "HLEN", mark) == 0
    assert len(calls.all) <= 2


async def test_batch_cancelled_before_its_close_is_no_success(broker: Broker) -> None:
    """Its publisher has told of no member, so none is counted when it calls; those that are counted later change
    nothing."""
    calls, go_on = Callbacks(broker), asyncio.Event()

    async def call(message: Message) -> None:
        await go_on.wait()

    serve(broker, call)
    async with broker.running():

        async def block() -> None:
            async with opened(broker) as batch:
                await batch.publish("sms", "1", key="k")
                await broker.cancel_batch("campaign")

        with pytest.raises(BatchEnded):
            await block()
        await calls.come("complete")
        go_on.set()
        await settled(broker, "sms")
        assert (await status(broker)).state == "complete"
    assert calls.states == ["complete"]


async def test_publish_that_has_begun_before_the_close_counts(broker: Broker) -> None:
    """The close waits for it, whichever step it has come to; a call that begins later is refused."""
    calls = Callbacks(broker)
    serve(broker, works)
    async with broker.running():
        async with opened(broker) as batch:
            begun = [asyncio.create_task(batch.publish("sms", str(number))) for number in range(3)]
            await asyncio.sleep(0)  # they ask the server for the topic
            late = [asyncio.create_task(batch.publish("sms", "late")) for _ in range(3)]
        await asyncio.gather(*begun)
        for each in await asyncio.gather(*late, return_exceptions=True):
            assert isinstance(each, ConfigError)
            assert "is not open" in str(each)
        await calls.come("complete", "success")
        assert await stored(broker) == 3
    assert numbers(calls.all[0]) == [3, 3, 0, 0, 0, 0]


async def test_a_handler_of_a_cancelled_batch_adds_no_more_members(broker: Broker) -> None:
    """Its error names the batch as its publisher did."""
    calls, told, may_add = Callbacks(broker), list[str](), asyncio.Event()

    async def add(message: Message) -> None:
        assert message.batch is not None
        told.append("runs")
        await may_add.wait()
        with pytest.raises(BatchEnded, match="'campaign'") as caught:
            await message.batch.publish("sms", "child")
        told.append(caught.value.name)

    serve(broker, add)
    async with broker.running():
        async with opened(broker) as batch:
            await batch.publish("sms", "parent")
        await until(lambda: bool(told), "its handler runs")
        await broker.cancel_batch("campaign")
        may_add.set()
        await calls.come("complete", "success")
    assert told == ["runs", "campaign"]
    assert numbers(calls.all[0]) == [1, 1, 0, 0, 0, 0]


async def test_a_replayed_dead_letter_makes_a_success(broker: Broker) -> None:
    """`on_complete` has come once and stays so."""
    calls, is_repaired = Callbacks(broker), False

    async def call(message: Message) -> None:
        if not is_repaired:
            await works(message)

    serve(broker, call)
    async with broker.running():
        async with opened(broker) as batch:
            await batch.publish("sms", "fail")
            await batch.publish("sms", "1")
        await calls.come("complete")
        is_repaired = True
        assert await replay(broker, "sender") == 1
        await calls.come("complete", "success")
    assert numbers(calls.all[1]) == [2, 2, 0, 0, 0, 0]


async def replay(broker: Broker, group: str) -> int:
    """Replay the dead letters of a group."""
    return await broker.dead_letters.replay(await broker.topics.existing("sms"), group)


async def test_members_that_a_handler_adds_count(broker: Broker) -> None:
    """Of the attempt that succeeded; children and grandchildren, in another topic, too."""
    calls, attempts = Callbacks(broker), 0

    async def parent(message: Message) -> None:
        nonlocal attempts
        attempts += 1
        assert message.batch is not None
        await message.batch.publish("mail", "child", key="k")
        if attempts == 1:
            raise OSError("once more")

    async def child(message: Message) -> None:
        assert message.batch is not None
        if message.data == b"child":
            await message.batch.publish("mail", "grandchild")
            with pytest.raises(ConfigError, match="takes no message_id"):
                await message.batch.publish("mail", "other", message_id="7")

    serve(broker, parent)
    serve(broker, child, topic="mail")
    async with broker.running():
        async with opened(broker) as batch:
            await batch.publish("sms", "parent")
        await calls.come("complete", "success")
    assert numbers(calls.all[0]) == [3, 3, 0, 0, 0, 0]


async def test_a_fallback_goes_on_for_its_member(broker: Broker) -> None:
    """It leaves when the message of the fallback does; a message without a batch has none."""
    calls, go_on = Callbacks(broker), asyncio.Event()

    @broker.handler("letter", group="post")
    async def post(message: Message) -> None:
        await go_on.wait()

    serve(broker, works, fallback=Fallback("letter"))
    async with broker.running():
        async with opened(broker) as batch:
            await batch.publish("sms", "reject")
        await settled(broker, "sms")
        assert numbers(await status(broker)) == [1, 0, 0, 0, 0, 1]
        assert not calls.all
        go_on.set()
        await calls.come("complete", "success")


@pytest.mark.parametrize("group", [None, "post"])
async def test_cancel_batch_reaches_members_in_a_fallback_topic(broker: Broker, group: str | None) -> None:
    """What has not started there does not start: one letter runs, two wait for their rate. A group that the fallback
    does not name is no part of the batch, and gets all of them."""
    calls, letters, copies, is_cancelled = Callbacks(broker), list[bytes](), list[bytes](), asyncio.Event()

    @broker.handler("letter", group="post", rate=Rate(1, per="1h", by=lambda _: "all"))
    async def post(message: Message) -> None:
        letters.append(message.data)

    async def copy(message: Message) -> None:
        await is_cancelled.wait()
        copies.append(message.data)

    if group is not None:
        broker.handler("letter", group="copies", ordering="none")(copy)
    serve(broker, works, fallback=Fallback("letter", group=group))
    async with broker.running():
        async with opened(broker) as batch:
            for _ in range(3):
                await batch.publish("sms", "reject", key="k")
        await settled(broker, "sms")
        await until(lambda: len(letters) == 1, "one is sent")
        await broker.cancel_batch("campaign")
        is_cancelled.set()
        await calls.come("complete")
        await settled(broker, "letter")
    assert letters == [b"reject"]
    assert numbers(calls.all[0]) == [3, 1, 0, 2, 0, 0]
    assert copies == ([] if group is None else [b"reject"] * 3)


async def test_a_reset_of_a_fallback_topic_knows_the_open_batches(broker: Broker) -> None:
    """Their members have gone there: what the reset skips is missing in them."""

    go_on = asyncio.Event()

    @broker.handler("letter", group="post")
    async def post(_message: Message) -> None:
        await go_on.wait()

    serve(broker, works, fallback=Fallback("letter"))
    async with broker.running(), opened(broker) as batch:
        batches = Batches(broker.client, broker.keys, broker.topics)
        await batch.publish("sms", "1")
        assert [await batches.open_in("sms", "sender"), await batches.open_in("letter", "post")] == [["campaign"], []]
        await batch.publish("sms", "reject")
        await until(lambda: batches.open_in("letter", "post"), "it is named")
        assert await batches.open_in("letter", "post") == ["campaign"]
        assert await batches.open_in("letter", "another") == []
        go_on.set()


async def test_other_groups_do_not_count(broker: Broker) -> None:
    """Nor do their dead letters when they are replayed."""
    calls, go_on = Callbacks(broker), asyncio.Event()

    @broker.handler("sms", group="audit", retry=SOON)
    async def audit(message: Message) -> None:
        raise Reject("never")

    async def call(_: Message) -> None:
        await go_on.wait()

    serve(broker, call)
    async with broker.running():
        async with opened(broker) as batch:
            await batch.publish("sms", "1")
        topic = await broker.topics.existing("sms")
        await until(lambda: broker.dead_letters.count(topic, "audit"), "the other group has a dead letter")
        assert numbers(await status(broker)) == [1, 0, 0, 0, 0, 1]
        assert await replay(broker, "audit") == 1
        go_on.set()
        await calls.come("complete", "success")


async def test_a_batch_that_expires_is_abandoned(broker: Broker) -> None:
    """Closed or not. A success may follow; a publisher that comes later is refused; the name is free after `keep`."""
    calls, go_on = Callbacks(broker), asyncio.Event()

    async def call(_: Message) -> None:
        await go_on.wait()

    serve(broker, call)
    async with broker.running():
        async with opened(broker, expires="10ms", keep="1h") as batch:
            await batch.publish("sms", "1")

        async def block2() -> None:
            async with opened(broker, "open", expires="10ms", keep="1ms") as late:
                await until(lambda: len(calls.all) == 2, "both are abandoned")
                assert calls.states == ["abandoned", "abandoned"]
                await late.publish("sms", "2")

        with pytest.raises(BatchEnded):
            await block2()
        assert sorted(map(numbers, calls.all)) == [[0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1]]
        go_on.set()
        await until(lambda: len(calls.all) == 3, "the first one succeeds")
        assert calls.states == ["abandoned", "abandoned", "success"]
        await until(lambda: is_forgotten(broker, "open"), "the state of the second is gone")
        assert [each.name for each in await broker.batches()] == ["campaign"]


async def is_forgotten(broker: Broker, name: str) -> bool:
    """Whether a batch is unknown."""
    return await broker.find_batch(name) is None


async def test_a_name_is_taken_until_its_batch_is_forgotten(broker: Broker) -> None:
    """A member of the old batch that ends later does not count in the new one."""
    calls = Callbacks(broker)
    serve(broker, works, {"retry": SOON})
    async with broker.running():
        async with opened(broker, keep="1ms") as batch:
            await batch.publish("sms", "fail")

            async def block3() -> None:
                async with opened(broker):
                    pass

            with pytest.raises(BatchExists, match="resume=True"):
                await block3()
        await calls.come("complete")
        await until(lambda: is_forgotten(broker, "campaign"), "it is forgotten")
        async with opened(broker) as batch:
            assert await replay(broker, "sender") == 1
            await settled(broker, "sms")
            assert numbers(await status(broker)) == [0, 0, 0, 0, 0, 0]


async def test_a_killed_publisher_is_resumed(broker: Broker) -> None:
    """The second one publishes all again: what was stored is stored once, delayed or not, and counts."""
    calls = Callbacks(broker)
    serve(broker, works)
    async with broker:
        topic = await broker.topics.ensure("sms")
        await ensure_groups(broker.client, broker.keys, topic, "sender")

        async def block4() -> None:
            async with opened(broker) as batch:
                await batch.publish("sms", "1", message_id="a", key="k")
                await batch.publish("sms", "2", message_id="b", delay="200ms")
                raise RuntimeError("killed")

        with pytest.raises(RuntimeError, match="killed"):
            await block4()

        async def block5() -> None:
            async with opened(broker, "other", resume=True):
                pass

        with pytest.raises(BatchEnded):
            await block5()
        async with opened(broker, resume=True) as batch:
            with pytest.raises(ConfigError, match="needs a message_id"):
                await batch.publish("sms", "1")
            refs = [await batch.publish("sms", "1", message_id="a", key="k")]
            refs.append(await batch.publish("sms", "2", message_id="b", delay="1ms"))
            refs.append(await batch.publish("sms", "3", message_id="c"))
        assert [each.is_new for each in refs] == [False, False, True]
        assert numbers(await status(broker)) == [3, 0, 0, 0, 0, 3]
    async with broker.running():
        await calls.come("complete", "success")
    assert numbers(calls.all[0]) == [3, 3, 0, 0, 0, 0]


async def test_a_batch_is_resumed_with_its_group(broker: Broker) -> None:
    """Members of another group would not be cancelled with it."""
    serve(broker, works)
    async with broker:
        async with opened(broker) as batch:
            pass
        async with opened(broker, resume=True) as again:
            assert again.id == batch.id
        with pytest.raises(ConfigError, match="opened with group='sender'"):
            await opened(broker, group="other", resume=True).__aenter__()


async def test_batch_is_resumed_with_its_callbacks(broker: Broker) -> None:
    """A topic that it was not opened with would never hear of it. Left out, its callbacks stay."""
    calls = Callbacks(broker)
    serve(broker, works)
    async with broker.running():
        await opened(broker, on_success=None).__aenter__()  # its publisher is killed
        with pytest.raises(ConfigError, match="opened with on_success=None"):
            await opened(broker, resume=True).__aenter__()
        with pytest.raises(ConfigError, match="opened with on_complete='reports'"):
            await opened(broker, on_complete="successes", on_success=None, resume=True).__aenter__()
        async with broker.batch("campaign", group="sender", resume=True) as batch:
            await batch.publish("sms", "1", message_id="1")
        await calls.come("complete")


async def test_an_unknown_publish_is_ended_by_the_close(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its member, so it is complete when the message has left, and not before."""
    calls = Callbacks(broker)
    serve(broker, works)
    async with broker.running():
        async with opened(broker) as batch:

            def lose(on_way: MemberOnWay, _: None) -> None:
                monkeypatch.undo()
                on_way.set_exception(PublishUnknown(str(on_way.ref), "sms"))

            monkeypatch.setattr(MemberOnWay, "set_result", lose)
            with pytest.raises(PublishUnknown):
                await batch.publish("sms", "1", message_id="a")
        await calls.come("complete", "success")
        assert await stored(broker) == 1
    assert numbers(calls.all[0]) == [1, 1, 0, 0, 0, 0]


async def stored(broker: Broker) -> int:
    """How many messages the topic has."""
    return sum([await ask(broker, "XLEN", broker.keys.stream("sms", number)) for number in (0, 1)])


@pytest.mark.parametrize("moment", [0, 1, 2])
async def test_a_publish_that_is_cancelled_is_one_message(broker: Broker, moment: int) -> None:
    """Its write goes on, so the close waits for its end, and does not send it again."""
    calls = Callbacks(broker)
    serve(broker, works)
    async with broker.running():
        async with opened(broker) as batch:
            await batch.publish("sms", "0", key="k")
            publishing = asyncio.create_task(batch.publish("sms", "1", key="k"))
            for _ in range(moment + 1):
                await asyncio.sleep(0)
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
        await calls.come("complete", "success")
        assert await stored(broker) == 2
    assert numbers(calls.all[0]) == [2, 2, 0, 0, 0, 0]


async def test_a_member_whose_reply_was_lost_is_one_message(settings: Settings) -> None:
    """Its publish says that its end is unknown. The close looks for it, and stores it only if it is not there."""
    with Server(tcp=True) as server:
        soon = timedelta(milliseconds=300)
        broker = Broker(
            replace(settings, url=server.url, preflight="warn", command_timeout=soon, unavailable_timeout=2 * soon)
        )
        calls = Callbacks(broker)
        serve(broker, works, partitions=2)
        async with broker.running():
            async with opened(broker) as batch:
                await batch.publish("sms", "0", key="k")
                server.pause()
                with pytest.raises(PublishUnknown):
                    await batch.publish("sms", "1", key="k")
                server.resume()
            await calls.come("complete", "success")
            assert await stored(broker) == 2
        assert numbers(calls.all[0]) == [2, 2, 0, 0, 0, 0]


async def test_what_a_batch_cannot_do_is_refused(broker: Broker) -> None:
    """Each error says what to do instead."""
    serve(broker, works)
    with pytest.raises(ConfigError, match="not connected"):
        opened(broker)
    async with broker.running():
        with pytest.raises(ConfigError, match="1 to 200 printable"):
            opened(broker, "")
        with pytest.raises(ConfigError, match="more than 0"):
            opened(broker, expires="0s")
        with pytest.raises(ConfigError, match="resume='yes'"):
            opened(broker, resume="yes")
        await broker.topics.ensure("small")
        async with opened(broker) as batch:
            with pytest.raises(ConfigError, match="has no group 'sender'"):
                await batch.publish("small", "1")
            with pytest.raises(ConfigError, match="unique"):
                await batch.publish("sms", "1", unique="u")
            await broker.topics.change("sms", max_length=10, on_full="trim")
            await broker.topics.find("sms")
            with pytest.raises(ConfigError, match="on_full=reject"):
                await batch.publish("sms", "1")
        with pytest.raises(ConfigError, match="is not open"):
            await batch.publish("sms", "1")


async def test_a_field_of_another_client_is_no_member(broker: Broker) -> None:
    """It stays a header, as any field that rsmq does not know. One of a batch that is not there changes nothing."""
    seen = list[tuple[dict[str, str], bool]]()

    async def call(message: Message) -> None:
        seen.append((message.headers, message.batch is None))

    serve(broker, call)
    async with broker.running():
        for value in ("7", "d9.abc sender xyz 3"):
            await ask(broker, "XADD", broker.keys.stream("sms", 0), "*", "data", "1", "batch", value)
        await until(lambda: len(seen) == 2, "both are handled")
        await settled(broker, "sms")
    assert seen == [({"batch": "7"}, True), ({}, False)]


async def test_the_poller_of_ends_leaves_open_batches_alone(broker: Broker) -> None:
    """A look changes nothing before the time, and two at once call back once."""
    calls = Callbacks(broker)
    serve(broker, works)
    async with broker.running():
        assert broker.worker is not None
        ends = BatchEnds(broker.client, broker.keys, broker.topics, broker.worker.consumers)

        async def block6() -> None:
            async with opened(broker, expires="1h"):
                await ends.look()
                found = await status(broker)
                assert found.state == "open"
                due = broker.keys.batch_due(int(found.id.partition(".")[0]))
                await ask(broker, "ZADD", due, 1, found.id)
                await asyncio.gather(ends.look(), ends.look())
                await calls.come("abandoned")

        with pytest.raises(BatchEnded):
            await block6()
        assert (await status(broker)).state == "abandoned"


async def test_a_call_with_several_members_adds_members_of_each_batch(broker: Broker) -> None:
    """Messages of a key that are handled and settled in one call, of two batches: each callback waits for its own."""
    calls = Callbacks(broker)

    @broker.handler("sms", group="sender", batch=10, linger="200ms", by="key")
    async def digest(messages: list[Message]) -> None:
        for message in messages:
            if message.data == b"parent":
                assert message.batch is not None
                await message.batch.publish("sms", "child", key="other")

    async with broker.running():
        async with opened(broker, "one") as one, opened(broker, "two") as two:
            await one.publish("sms", "parent", key="k")
            await two.publish("sms", "parent", key="k")
            await one.publish("sms", "last", key="k")
        await calls.come("complete", "complete", "success", "success")
    assert {each["batch"]: numbers(each)[:2] for each in calls.all} == {"one": [3, 3], "two": [2, 2]}


async def test_members_of_a_key_keep_the_order_of_the_calls(broker: Broker) -> None:
    """Also those that are published together before the batch has looked at the topic."""
    serve(broker, works)
    async with broker.running():
        async with opened(broker) as batch:
            refs = await asyncio.gather(*[batch.publish("sms", str(number), key="k") for number in range(100)])
        entries = await ask(broker, "XRANGE", broker.keys.stream("sms", refs[0].partition_number), "-", "+")
    assert [int(fields[1]) for _, fields in entries] == list(range(100))


async def test_members_of_several_topics_keep_the_order_of_their_keys(broker: Broker) -> None:
    """Also if the call that asks for a topic is cancelled meanwhile."""
    serve(broker, works)
    serve(broker, works, topic="mail")
    async with broker.running():
        async with opened(broker) as batch:
            calls = [
                asyncio.create_task(batch.publish(("sms", "mail")[n // 3 % 2], str(n), key="k")) for n in range(60)
            ]
            await asyncio.sleep(0)
            calls[0].cancel()
            refs = (await asyncio.gather(*calls, return_exceptions=True))[1:]
        for topic in ("sms", "mail"):
            (partition,) = {
                each.partition_number for each in refs if isinstance(each, MessageRef) and each.topic == topic
            }
            entries = await ask(broker, "XRANGE", broker.keys.stream(topic, partition), "-", "+")
            found = [int(fields[1]) for _, fields in entries]
            assert found == [n for n in range(1, 60) if ("sms", "mail")[n // 3 % 2] == topic]


async def test_each_member_of_a_broker_with_codecs_takes_one_number(settings: Settings) -> None:
    """A number that is not used leaves a gap, and a page of gaps costs the server a change for each member."""
    broker = Broker(replace(settings, preflight="warn", partitions=2), codecs=[Zstd()])
    serve(broker, works)
    async with broker.running():
        async with opened(broker) as batch:
            for number in range(16):
                await batch.publish("sms", str(number))
        assert await ask(broker, "STRLEN", broker.keys.batch_members(batch.id)) == 8


async def test_a_batch_goes_over_a_resize_of_its_topics(broker: Broker) -> None:
    """Of its members' topic and of those of its callbacks: members of before are counted, a resumed publisher stores
    none twice, and what was cancelled before does not run."""
    calls, ran = Callbacks(broker), list[bytes]()

    async def note(message: Message) -> None:
        ran.append(message.data)

    serve(broker, note)
    async with broker.running():
        async with opened(broker, "gone", on_complete=None, on_success=None) as gone:
            refs = [await gone.publish("sms", f"gone {n}", delay="1h") for n in range(4)]
        with suppress(ZeroDivisionError):
            async with opened(broker) as batch:
                kept = [await batch.publish("sms", f"{n}", message_id=f"id{n}", delay="1h") for n in range(3)]
                raise ZeroDivisionError
        await broker.publish("sms", "alone")
        await broker.cancel_batch("gone")
        for topic in ("sms", "reports", "successes"):
            await broker.topics.resize(topic, 4)
            await until(partial(has_partitions, broker, topic, 4), f"{topic} is resized")
        async with opened(broker, resume=True) as batch:
            for number in range(4):
                again = await batch.publish("sms", f"{number}", message_id=f"id{number}", delay="1h")
                assert again.is_new is (number == 3)
        for ref in (*refs, *kept, again):
            await broker.reschedule(ref, delay="0s")
        await calls.come("complete", "success")
        await until(partial(has_cancelled, broker, 4), "the members of the other one are cancelled")
    assert sorted(ran) == [b"0", b"1", b"2", b"3", b"alone"]


async def has_partitions(broker: Broker, topic: str, count: int) -> bool:
    """Whether messages go to so many partitions."""
    return (await broker.topics.existing(topic)).partitions == count


async def has_cancelled(broker: Broker, count: int) -> bool:
    """Whether so many members of the batch `gone` are cancelled."""
    return (await status(broker, "gone")).cancelled == count
