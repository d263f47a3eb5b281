"""Messages with a unique name: at most one is alive, and no name is held by what has ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from tenacity import wait_fixed

from rsmq import Broker, BrokerError, Cancelled, ConfigError, Message, Reject, RetryPolicy, Settings, TopicFull
from rsmq.control.status import GroupState
from rsmq.model.keys import Keys
from rsmq.model.message_ref import MessageRef
from rsmq.model.unique import Unique
from rsmq.producer.claims import Claim, Claims
from rsmq.redis.client.raw_connection import RawConnection
from rsmq.sql import Outbox
from rsmq.testing.proxy import Proxy
from rsmq.worker.retention import Retention
from tests.contract.witness import ask
from tests.patience import until
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("no_task_left")

LATER = RetryPolicy(max_attempts=3, wait=wait_fixed(3600))
STYLES: list[dict[str, Any]] = [{}, {"ordering": "none"}, {"distribution": "shared"}]


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """A broker with a prefix of its own."""
    return Broker(replace(settings, preflight="warn", partitions=1))


async def edit(broker: Broker, payload: Any = "x", **options: Any) -> MessageRef:
    """Publish under the name of the tests."""
    return await broker.publish("in", payload, unique="user-7", **options)


async def state_of(broker: Broker, ref: MessageRef, group: str = "g") -> str:
    """Where a message is."""
    status = await broker.look(ref)
    found = status.group(group)
    return found.state if found else status.state


async def reaches(broker: Broker, ref: MessageRef, state: GroupState) -> None:
    """Wait until it is there."""

    async def is_there() -> bool:
        return await state_of(broker, ref) == state

    await until(is_there, f"the message is {state}")


class Work:
    """Handlers that wait, fail or reject, as the payload says."""

    def __init__(self) -> None:
        self.began, self.seen = Counter[str](), list[Any]()
        self.go_on = asyncio.Event()

    async def __call__(self, payload: str, message: Message) -> None:
        self.began[message.id] += 1
        if payload == "reject":
            raise Reject("no")
        if payload == "fail":
            raise OSError("out of paper")
        if payload == "wait":
            await self.go_on.wait()
        self.seen.append(payload)

    async def begins(self, ref: MessageRef) -> None:
        """Wait until its handler runs."""
        await until(lambda: ref in self.began, "it runs")


@pytest.mark.parametrize("options", STYLES, ids=["key", "none", "shared"])
async def test_unique_message_holds_its_name_until_it_is_settled(broker: Broker, options: dict[str, Any]) -> None:
    """While it is undelivered, in hand, or parked: the ref of the one that is there. Then the name is free."""
    work = Work()
    broker.handler("in", group="g", retry=LATER, **options)(work)
    async with broker:
        first = await edit(broker, "wait")
        assert (first.is_new, first.key, first.is_same) == (True, "user-7", True)
        again = await edit(broker, "x")
        assert (again, again.is_new, again.is_same) == (first, False, None)
        async with broker.running():
            await work.begins(first)
            assert await edit(broker) == first
            work.go_on.set()
            await reaches(broker, first, "settled")
            second = await edit(broker, "fail")
            assert second.is_new
            await reaches(broker, second, "waiting_for_retry")
            assert await edit(broker) == second
            assert await broker.cancel(second) == Cancelled({"g": "cancelled"})
            third = await edit(broker, "reject")
            assert third.is_new
            await reaches(broker, third, "dead")
            assert (await edit(broker, "last")).is_new
            await until(lambda: "last" in work.seen, "it is handled")


async def test_unique_message_until_started_lets_an_edit_pass_while_it_runs(broker: Broker) -> None:
    """An edit that comes while the handler runs is not lost; two waiting ones are never there."""
    work = Work()
    broker.handler("in", group="g")(work)
    async with broker.running():
        first = await edit(broker, "wait", until="started")
        await work.begins(first)
        second = await edit(broker, "x", until="started")
        assert second.is_new
        work.go_on.set()
        await reaches(broker, second, "settled")
        assert list(work.began) == [first, second]


async def test_unique_message_holds_its_name_in_every_group(broker: Broker) -> None:
    """`settled` means all groups, `started` the first one, and what is cancelled for a group does not count there."""
    async with broker:
        await broker.publish("in", "x")
        for group in ("a", "b"):
            await ask(broker, "XGROUP", "CREATE", broker.keys.stream("in", 0), group, "$")
        first = await edit(broker)
        await broker.cancel(first, group="a")
        assert await edit(broker) == first
        await broker.cancel(first, group="b")
        second = await edit(broker)
        assert second.is_new
        stream = broker.keys.stream("in", 0)
        await ask(broker, "XREADGROUP", "GROUP", "a", "m", "STREAMS", stream, ">")
        assert await edit(broker) == second
        early = await broker.publish("in", "x", unique="other", key="user-7", until="started")
        assert await broker.publish("in", "x", unique="other", key="user-7", until="started") == early
        await ask(broker, "XREADGROUP", "GROUP", "a", "m", "STREAMS", stream, ">")
        assert (await broker.publish("in", "x", unique="other", key="user-7", until="started")).is_new


async def test_throttle_holds_the_name_for_a_time(broker: Broker) -> None:
    """Also after the message is settled; then it is free, also while the message waits."""
    work = Work()
    broker.handler("in", group="g")(work)
    async with broker.running():
        first = await edit(broker, "x", until="1h")
        await reaches(broker, first, "settled")
        assert await edit(broker, "x", until="1h") == first
        other = await broker.publish("in", "wait", unique="short", until=timedelta(milliseconds=1))

        async def is_free() -> bool:
            return bool((await broker.publish("in", "x", unique="short", until="1ms")).is_new)

        await until(is_free, "its time is over")
        assert other not in work.began or not work.go_on.is_set()
        work.go_on.set()


async def test_replace_in_a_stream_that_takes_nothing_leaves_the_old_message(broker: Broker) -> None:
    """Another client has written the largest id: the message that is there is not cancelled for one that cannot be."""
    handled: list[str] = []

    @broker.handler("in", group="g")
    async def handle(text: str) -> None:
        handled.append(text)

    async with broker:
        async with broker.running():
            pass
        first = await edit(broker, "first")
        stream = broker.keys.stream("in", 0)
        await ask(broker, "XSETID", stream, f"{2**64 - 1}-{2**64 - 1}")
        with pytest.raises(BrokerError, match="takes no entries"):
            await edit(broker, "second", on_conflict="replace")
        assert await state_of(broker, first) != "cancelled"
        async with broker.running():
            await until(lambda: handled == ["first"], "the first one is handled")


async def test_replace_takes_the_place_of_what_no_worker_has(broker: Broker) -> None:
    """Delayed or undelivered: the newest payload is handled, and only that. What a worker has is kept."""
    work = Work()
    broker.handler("in", group="g")(work)
    newest: dict[str, Any] = {"on_conflict": "replace"}
    async with broker:
        refs = [await edit(broker, f"delayed {n}", delay="1h", **newest) for n in range(3)]
        assert [ref.is_new for ref in refs] == [True] * 3
        assert await ask(broker, "ZCARD", broker.keys.delayed("in", 0)) == 1
        assert [(await broker.look(ref)).state for ref in refs] == ["cancelled", "cancelled", "delayed"]
        early = await edit(broker, "no group yet", **newest)
        assert early.is_new
        assert await ask(broker, "ZCARD", broker.keys.delayed("in", 0)) == 0
        assert (await edit(broker, "cannot be marked", **newest)).is_new is False
        await ask(broker, "XGROUP", "CREATE", broker.keys.stream("in", 0), "g", "0")
        second = await edit(broker, "unread", **newest)
        last = await edit(broker, "wait", **newest)
        assert second.is_new
        assert last.is_new
        assert [await state_of(broker, ref) for ref in (early, second)] == ["cancelled", "cancelled"]
        async with broker.running():
            await work.begins(last)
            assert (await edit(broker, "late", **newest)).is_new is False
            work.go_on.set()
            await reaches(broker, last, "settled")
        assert work.seen == ["wait"]


async def test_extend_moves_a_delayed_message(broker: Broker) -> None:
    """It keeps its payload, is due at the new time, and is found by its id there."""
    async with broker:
        first = await edit(broker, "first", delay="5m")
        before = (await broker.look(first)).due
        again = await edit(broker, "second", delay="2h", on_conflict="extend")
        assert (again, again.is_new) == (first, False)
        status = await broker.look(first)
        assert status.due
        assert before
        assert status.due - before > timedelta(hours=1)
        with pytest.raises(ConfigError, match="give delay or at"):
            await edit(broker, on_conflict="extend")


async def test_extend_does_not_move_a_message_beyond_its_expiry(broker: Broker) -> None:
    """It keeps its due time: it would end without an attempt. It was moved, and dropped when it was due."""
    async with broker:
        first = await edit(broker, "first", delay="1h", expires="2h")
        before = (await broker.look(first)).due
        for late in ({"delay": "3h"}, {"at": datetime(2100, 1, 1, tzinfo=UTC)}):
            again = await edit(broker, "second", on_conflict="extend", **late)
            assert (again, again.is_new) == (first, False)
            assert (await broker.look(first)).due == before
        await edit(broker, "third", delay="90m", on_conflict="extend")
        assert (await broker.look(first)).due != before


async def test_delayed_unique_message_holds_its_name_until_it_is_settled(broker: Broker) -> None:
    """Delayed, rescheduled, moved into the stream, and handled; cancelled while it is delayed frees it."""
    work = Work()
    broker.handler("in", group="g")(work)
    async with broker:
        gone = await edit(broker, delay="1h")
        assert await edit(broker) == gone
        await broker.cancel(gone)
        first = await edit(broker, "wait", delay="1h")
        assert first.is_new
        await broker.reschedule(first, delay="0s")
        assert await edit(broker) == first
        async with broker.running():
            await work.begins(first)
            assert await edit(broker) == first
            work.go_on.set()
            await reaches(broker, first, "settled")
            assert (await edit(broker)).is_new


async def test_unique_message_with_an_id_is_stored_once(broker: Broker) -> None:
    """A publish that is sent again finds its own message, also when the name is free again."""
    work = Work()
    broker.handler("in", group="g")(work)
    async with broker.running():
        first = await edit(broker, message_id="a")
        await reaches(broker, first, "settled")
        again = await edit(broker, message_id="a")
        assert (again, again.is_new) == ("a", False)
        assert (await edit(broker, message_id="b")).is_new
        await until(lambda: work.began.keys() >= {"a", "b"}, "both are handled")
        assert work.began["a"] == 1


async def test_unique_message_meets_a_full_topic(settings: Settings) -> None:
    """It is refused, and what holds the name stays."""
    broker = Broker(replace(settings, preflight="warn", partitions=1, max_length=1))
    async with broker:
        first = await edit(broker)
        await ask(broker, "XGROUP", "CREATE", broker.keys.stream("in", 0), "g", "0")
        with pytest.raises(TopicFull):
            await edit(broker, on_conflict="replace")
        with pytest.raises(TopicFull):
            await broker.publish("in", "x", unique="other", key="user-7")
        assert await state_of(broker, first) == "unread"
        assert await edit(broker) == first


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"unique": ""}, "unique="),
        ({"unique": 7}, "unique="),
        ({"unique": "a", "until": "never"}, "until='never' is not possible: use 'settled', 'started', or a duration"),
        ({"unique": "a", "until": 5}, "until='5s'"),
        ({"unique": "a", "on_conflict": "drop"}, "on_conflict="),
        ({"until": "settled"}, "need unique"),
        ({"uniq": "a"}, "unique"),
    ],
)
async def test_unique_options_that_are_refused(broker: Broker, options: dict[str, Any], match: str) -> None:
    """The error says what to write."""
    async with broker:
        with pytest.raises(ConfigError, match=match):
            await broker.publish("in", "x", **options)


async def test_many_publishers_store_one_message(broker: Broker) -> None:
    """Two brokers at the same time, with different payloads: one message at a time, and each ref names it."""
    async with broker, Broker(broker.settings) as other:
        refs = await asyncio.gather(*[edit(each, n) for n in range(50) for each in (broker, other)])
        assert len(set(refs)) == 1
        assert sum(ref.is_new is True for ref in refs) == 1
        assert await ask(broker, "XLEN", broker.keys.stream("in", 0)) == 1


async def test_lost_replies_store_one_message(broker: Broker) -> None:
    """Each write of a batch is executed, and its reply is lost once. The answer does not claim what is not known."""
    async with broker:
        first = await edit(broker, "first")
        await ask(broker, "XGROUP", "CREATE", broker.keys.stream("in", 0), "g", "0")
        topic = await broker.topics.existing("in")
        batch = Claims(broker.keys, topic, 0, broker.keys.stream("in", 0), deadline=0.0, window_ms=60_000)
        claims = []
        for n, on_conflict in enumerate(("keep", "replace", "keep")):
            name = Unique("user-7" if n < 2 else "fresh", "settled", on_conflict)  # type: ignore[arg-type]
            claims.append(Claim([b"data", b"1", b"id", b"m%d" % n], name, ""))
            batch.add(f"m{n}", claims[-1], 1)
        connection = RawConnection(broker.client)
        await connection.open()
        try:
            decided = 0
            while batch.ids:
                await connection.exchange(batch.commands())  # lost
                decided, _, trouble = batch.read(await connection.exchange(batch.commands()))
                assert trouble is None
                batch.confirm(decided)
        finally:
            await connection.close()
        assert [claim.answer for claim in claims] == [(False, None), (None, None), (None, None)]
        assert claims[0].keeper == first
        assert await ask(broker, "XLEN", broker.keys.stream("in", 0)) == 3
        assert await ask(broker, "HLEN", broker.keys.cancels("in", 0, "g")) == 1
        assert await edit(broker) == "m1"


async def test_names_are_forgotten_with_their_messages(broker: Broker) -> None:
    """What retention has removed, and times that are over; not what is there, or is still in hand."""
    async with broker:
        keys, stream = broker.keys, broker.keys.stream("in", 0)
        retention = Retention(broker.client, keys, broker.settings, broker.topics, [])
        await ask(broker, "XGROUP", "CREATE", stream, "g", "0", "MKSTREAM")
        for name, options in {"gone": {}, "in hand": {}, "delayed": {"delay": "1h"}, "short": {"until": "1ms"}}.items():
            await broker.publish("in", "x", key="k", unique=name, **options)  # type: ignore[arg-type]
        cancelled = await broker.publish("in", "x", key="k", unique="cancelled", delay="1h")
        await broker.cancel(cancelled)
        read = await ask(broker, "XREADGROUP", "GROUP", "g", "m", "STREAMS", stream, ">")
        ids = [entry_id for entry_id, _ in read[0][1]]
        await ask(broker, "XACK", stream, "g", ids[0], ids[2])
        await ask(broker, "XTRIM", stream, "MAXLEN", "0")
        await broker.publish("in", "x", key="k", unique="there")

        async def is_tidy() -> bool:
            await retention.forget_names("in", 0)
            return sorted(await ask(broker, "HKEYS", keys.unique("in", 0))) == [b"delayed", b"in hand", b"there"]

        await until(is_tidy, "what is gone is forgotten")


async def test_connection_that_breaks_is_no_second_message(keys: Keys) -> None:
    """The reply is lost with its connection: the publish is sent again, finds its own message, and says so."""
    with Server(tcp=True) as server:
        async with Proxy(server.port) as proxy:
            settings = Settings(
                url=proxy.url, prefix=keys.prefix, partitions=1, preflight="warn", command_timeout=timedelta(seconds=20)
            )
            async with Broker(settings) as broker, anyio.create_task_group() as tasks:
                await broker.publish("in", "x")
                refs = list[MessageRef]()

                async def publish() -> None:
                    refs.append(await edit(broker))

                for answer in (b"*2\r\n$2\r\nOK", b"*8\r\n$4\r\nHELD"):  # stored, then held by itself
                    proxy.hold(lambda data, answer=answer: data.startswith(answer))  # type: ignore[misc]
                    tasks.start_soon(publish)
                    await until(lambda: proxy.is_holding, "the reply is on its way")
                    proxy.reset()
                    proxy.release()
                    await until(lambda answer=answer: len(refs) > (answer[:2] == b"*8"), "it is published")  # type: ignore[misc]
                assert [ref.is_new for ref in refs] == [None, False]
                assert refs[0] == refs[1]
                assert await ask(broker, "XLEN", keys.stream("in", 0)) == 2


async def test_other_ways_to_publish_refuse_unique_and_say_what_to_do(broker: Broker) -> None:
    """In a batch, with a handler's message, and from a transaction: nothing is stored."""
    engine = create_engine("sqlite://")
    outbox = Outbox(engine)
    refused = list[str]()

    @broker.handler("in", group="g")
    async def handle(message: Message) -> None:
        try:
            await message.publish("out", "x", unique="user-7")  # type: ignore[call-arg]
        except ConfigError as error:
            refused.append(str(error))

    async with broker.running():
        await broker.publish("in", "x")
        await until(lambda: asyncio.sleep(0, bool(refused)), "the handler has tried")
        for option in ("unique", "until", "on_conflict"):
            with pytest.raises(ConfigError, match=rf"publish_many takes no {option}: .* call of broker\.publish"):
                await broker.publish_many("out", ["x"], **{option: "user-7"})  # type: ignore[call-arg]
        with Session(engine) as session, pytest.raises(ConfigError, match=r"outbox\.publish_many takes no unique"):
            outbox.publish_many(session, "out", ["x"], unique="user-7")  # type: ignore[call-overload]
        assert await ask(broker, "XLEN", broker.keys.stream("out", 0)) == 0
    assert "message.publish takes no unique" in refused[0]


async def test_unique_message_with_an_id_of_its_own_does_not_say_what_it_cannot_know(broker: Broker) -> None:
    """A message with the same id and another key may be in another partition. In one partition it is known."""
    async with broker:
        await broker.topics.ensure("in", 8)
        await broker.publish("in", "x", key="one", message_id="order-5")
        refs = [
            await broker.publish("in", "x", key=f"key {number}", unique=f"name {number}", message_id="order-5")
            for number in range(20)
        ]
        assert {each.is_new for each in refs} == {None, False}
        assert (await broker.publish("in", "x", key="other", unique="free")).is_new is True
        await broker.topics.ensure("narrow", 1)
        assert (await broker.publish("narrow", "x", key="a", unique="name", message_id="order-5")).is_new is True
        assert (await broker.publish("narrow", "x", key="b", unique="other", message_id="order-5")).is_new is False
