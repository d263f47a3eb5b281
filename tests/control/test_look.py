"""`broker.look`: where a message is, compared with what the test did to each of them."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tenacity import wait_fixed

from rsmq import Broker, Burial, ConfigError, Message, Reject, Retry, RetryPolicy, Settings
from rsmq.control import finder as finder_module
from rsmq.control.finder import Finder
from rsmq.model.message import new_message_id
from rsmq.model.message_ref import Location, MessageRef
from rsmq.model.partition import partition_for
from rsmq.model.stream_id import sent_ms
from rsmq.redis.scripts import FIND_DELAYED
from rsmq.redis.streams import trim
from rsmq.redis.topics import Topic
from tests.contract.witness import ask
from tests.control.ledger import Ledger
from tests.patience import until

pytestmark = pytest.mark.usefixtures("no_task_left")

LATER = RetryPolicy(max_attempts=3, wait=wait_fixed(3600))
HOUR = timedelta(hours=1)


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """A broker with a prefix of its own."""
    return Broker(replace(settings, preflight="warn", partitions=3))


@pytest.mark.parametrize("ordering", ["key", "none"])
async def test_look_equals_the_ledger_in_every_state(broker: Broker, ordering: str) -> None:
    """Messages delayed, settled, parked, dead, running and waiting behind their key, and not delivered at all."""
    ledger: dict[MessageRef, str] = {}
    go_on = asyncio.Event()
    started: set[str] = set()

    @broker.handler("orders", group="billing", retry=LATER, ordering=ordering, concurrency=100)  # type: ignore[call-overload]
    async def handle(message: Message) -> None:
        started.add(message.id)
        match message.data:
            case b"waiting_for_retry":
                raise OSError("out of paper")
            case b"dead":
                raise Reject("no such customer")
            case b"running":
                await go_on.wait()

    async with broker.running():
        for number in range(40):
            state = random.choice(["delayed", "settled", "waiting_for_retry", "dead", "running"])
            options = {"delay": HOUR} if state == "delayed" else {}
            ref = await broker.publish("orders", state, key=f"k{number}", **options)  # type: ignore[arg-type]
            ledger[ref] = state
            if state == "running" and ordering == "key":
                behind = await broker.publish("orders", "settled", key=f"k{number}")
                ledger[behind] = "waiting_for_key"
        quick = {ref for ref, state in ledger.items() if state not in ("delayed", "waiting_for_key")}
        await until(lambda: asyncio.sleep(0, quick <= started), "all that may start have started")
        await broker.pause_group("orders", "billing")
        await until(lambda: is_paused(broker), "it is paused")
        assert broker.worker
        await broker.worker.consumers[0].fetchers.exclude()
        for number in range(20):
            ledger[await broker.publish("orders", "settled", key=f"k{number}")] = "unread"
        done = [ref for ref, state in ledger.items() if state in ("settled", "waiting_for_retry", "dead")]
        stats = broker.worker.consumers[0].stats
        ends = ("settled", "retried", "buried")
        await until(lambda: asyncio.sleep(0, sum(stats[each] for each in ends) == len(done)), "they are settled")
        await until(lambda: all_settled(broker, done), "the server has confirmed it")
        for ref, state in ledger.items():
            status = await broker.look(ref)
            billing = status.group("billing")
            assert (billing.state if billing else status.state) == state, (ref, status)
            assert (status.id, status.topic, status.key) == (ref, "orders", ref.key)
            if status.stream_id is not None:  # either id finds it, and the answer is the same
                assert await broker.look(f"{status.partition}/{status.stream_id}", topic="orders") == status
            if state == "dead":
                assert await broker.look(str(ref), topic="orders", key=ref.key) == status
            if state == "running":
                assert billing
                assert (billing.member, billing.attempt) == (broker.worker.consumers[0].member, 1)  # type: ignore[union-attr]
            if state == "waiting_for_retry":
                assert billing
                assert (billing.attempt, billing.error) == (1, "OSError: out of paper")
                assert billing.due
            if state == "dead":
                assert billing
                assert (billing.reason, billing.error) == ("rejected", "no such customer")
                (letter,) = [each async for each in broker.dead_letters.iterate(await topic_of(broker), "billing")
                             if each.message_id == ref]  # fmt: skip
                assert billing.letter == letter.id
        go_on.set()


async def topic_of(broker: Broker) -> Topic:
    """The topic of the test."""
    return await broker.topics.existing("orders")


async def is_paused(broker: Broker) -> bool:
    """Whether the worker reads nothing more."""
    assert broker.worker is not None
    return broker.worker.consumers[0].fetchers.is_paused


async def all_settled(broker: Broker, refs: list[MessageRef]) -> bool:
    """Whether the server has confirmed all of them."""
    states = [(await broker.look(ref)).group("billing") for ref in refs]
    return all(each is not None and each.state in ("settled", "waiting_for_retry", "dead") for each in states)


@pytest.mark.parametrize("has_output", [False, True])
@pytest.mark.parametrize("ordering", ["key", "none"])
async def test_look_has_the_attempts_and_their_errors(broker: Broker, ordering: str, has_output: bool) -> None:
    """While it is parked, and when it is a dead letter, by itself or together with an output of `on_dead`."""
    soon = RetryPolicy(max_attempts=4, wait=wait_fixed(0))

    @broker.handler("orders", group="billing", retry=soon, ordering=ordering)  # type: ignore[call-overload]
    async def handle(message: Message) -> None:
        if message.data == b"waiting_for_retry":
            raise Retry("out of paper", after=HOUR)
        raise OSError(f"try {message.attempt}")

    @broker.on_dead("orders", group="billing")
    async def bury(message: Message, burial: Burial) -> None:
        if has_output:
            await message.publish("unbilled", 1)

    async with broker.running():
        parked, dead = [await broker.publish("orders", each, key=each) for each in ("waiting_for_retry", "dead")]
        await until(lambda: is_in(broker, parked, "waiting_for_retry"), "it is parked")
        await until(lambda: is_in(broker, dead, "dead"), "it is dead")
        waits, died = [(await broker.look(each)).group("billing") for each in (parked, dead)]
        assert waits
        assert died
        assert [(each.attempt, each.error) for each in waits.failed] == [(1, "Retry: out of paper")]
        assert [(each.attempt, each.error) for each in died.failed] == [(n, f"OSError: try {n}") for n in (1, 2, 3)]
        assert (died.error, died.attempt) == ("OSError: try 4", 4)
        (letter,) = [each async for each in broker.dead_letters.iterate(await topic_of(broker), "billing")]
        assert letter.history == died.failed
        assert letter.history[0].at <= letter.history[2].at <= letter.at
        where = ("orders", dead.partition_number)
        await ask(broker, "XADD", broker.keys.dlq(*where, "billing"), "*", "dlq.origin", letter.origin)
        await ask(broker, "XDEL", broker.keys.dlq(*where, "billing"), letter.id.partition("/")[2])
        old = (await broker.look(dead)).group("billing")  # a letter of a version that kept no history
        assert old
        assert old.failed == died.failed


async def is_in(broker: Broker, ref: MessageRef, state: str) -> bool:
    """Whether its group has brought it there."""
    billing = (await broker.look(ref)).group("billing")
    return billing is not None and billing.state == state


async def test_look_without_a_worker(broker: Broker) -> None:
    """A delayed message, an undelivered one with the number before it, one of no group, and ids that are not there."""
    async with broker:
        first = [await broker.publish("orders", n, key="ada") for n in range(5)]
        assert (await broker.look(first[3])).groups == ()
        await ask(broker, "XGROUP", "CREATE", broker.keys.stream("orders", first[0].partition_number), "g", "0")
        assert [(await broker.look(ref)).group("g").before for ref in first] == [0, 1, 2, 3, 4]  # type: ignore[union-attr]
        named = await broker.publish("orders", 1, message_id="order-17", delay="1h")
        status = await broker.look("order-17", topic="orders")
        assert (status.state, status.partition) == ("delayed", named.partition_number)
        assert status.due
        assert (await broker.look("order-18", topic="orders")).state == "unknown"
        assert (await broker.look(new_message_id(), topic="orders")).state == "unknown"
        with pytest.raises(ConfigError, match="pass topic='orders'"):
            await broker.look(str(first[0]))
        for wrong in (None, 5, b"id", ["id"]):
            with pytest.raises(ConfigError, match="is no message id"):
                await broker.look(wrong, topic="orders")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="no topic 'nothing'"):
            await broker.look(str(first[0]), topic="nothing")


async def test_look_at_a_delayed_message_that_has_become_due(broker: Broker) -> None:
    """It is found in the stream, whose ids are much later than the time in its own id."""
    async with broker:
        ref = await broker.publish("orders", 1, delay="1h")
        delayed = broker.keys.delayed("orders", ref.partition_number)
        ((packed, due),) = [await ask(broker, "ZRANGE", delayed, 0, -1, "WITHSCORES")]
        assert packed
        (entry_id,) = [await ask(broker, "XADD", broker.keys.stream("orders", ref.partition_number), f"{int(due)}-0",
                                 "data", "1", "id", ref)]  # fmt: skip
        await ask(broker, "DEL", delayed)
        status = await broker.look(ref)
        assert (status.state, status.stream_id) == ("stored", entry_id.decode())


async def test_look_at_a_message_that_was_removed_behind_one_that_waits(broker: Broker) -> None:
    """An older message is still there, and it counts as removed all the same."""

    @broker.handler("orders", group="billing", retry=LATER)
    async def handle(message: Message) -> None:
        if message.data == b"waits":
            raise OSError("out of paper")

    partitions = broker.settings.partitions
    number = partition_for("ada", partitions)
    other = next(each for each in map(str, range(99)) if partition_for(each, partitions) == number)
    async with broker.running():
        waits, fine = [
            await broker.publish("orders", each, key=key) for each, key in (("waits", "ada"), ("fine", other))
        ]
        last = fine
        while sent_ms(last) == sent_ms(fine):  # retention knows the last one that it removed, to the millisecond
            last = await broker.publish("orders", "fine", key=other)
        await until(lambda: all_settled(broker, [last]), "it is settled")
        await trim(broker.client, broker.keys, "orders", number, keep_age_ms=0, keep_length=0, exact=True)
        assert (await broker.look(fine)).state == "removed"
        assert (await broker.look(waits)).state == "stored"


async def test_look_at_a_message_that_retention_has_removed(broker: Broker) -> None:
    """Its id is older than everything that is kept; of a dead letter the rest is still told."""

    @broker.handler("orders", group="billing", retry=LATER)
    async def handle(message: Message) -> None:
        if message.data == b"dead":
            raise Reject("no such customer")

    async with broker.running():
        refs = [await broker.publish("orders", each, key="ada") for each in ("fine", "dead", "newest")]
        await until(lambda: all_settled(broker, refs[2:]), "it is settled")
        where = ("orders", refs[0].partition_number)
        await trim(broker.client, broker.keys, *where, keep_age_ms=0, keep_length=0, exact=True)
        await broker.publish("orders", "fine", key="ada")
        assert (await broker.look(refs[0])).state == "removed"
        status = await broker.look(refs[1])
        assert status.state == "removed"
        assert [each.state for each in status.groups] == ["dead"]
        (letter,) = [each async for each in broker.dead_letters.iterate(await topic_of(broker), "billing")]
        assert await broker.look(letter.origin, topic="orders") == status  # by its stream id


async def test_look_at_an_output_that_is_delayed(broker: Broker) -> None:
    """The server does not remember such an id, so all delayed messages are looked at, but no payload misleads it."""
    async with broker:
        ref = await broker.publish("orders", 1, delay="1h", key="ada")
        mine = MessageRef.of(str(ref), Location("orders", ref.partition_number), "ada")
        wanted = b"\x00\x00\x00\x02id" + len(ref).to_bytes(4) + ref.encode()
        other = await broker.publish("orders", wanted, delay="2h", key="ada")
        await ask(broker, "DEL", broker.keys.dedup("orders", ref.partition_number, ref))
        assert (await broker.look(mine)).due == (await broker.look(ref)).due != (await broker.look(other)).due
        found = await Finder(broker.client, broker.keys).find(ref, await topic_of(broker))
        assert found
        assert found.message.data == b"1"


async def test_delayed_messages_are_searched_only_for_what_is_not_in_the_stream(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked at one by one. What becomes due during that search is found, too."""
    async with broker:
        stored = await broker.publish("orders", 1, key="ada")
        moves = await broker.publish("orders", 2, key="ada", delay="1h")
        await ask(broker, "DEL", broker.keys.dedup("orders", moves.partition_number, moves))
        finder, topic, searched = Finder(broker.client, broker.keys), await topic_of(broker), list[str]()
        search = finder._find_delayed

        async def find_delayed(message_id: str, topic: Topic, partition: int, due: int | None) -> Any:
            searched.append(message_id)
            if partition == moves.partition_number:
                await ask(broker, "DEL", broker.keys.delayed("orders", partition))
                stream = broker.keys.stream("orders", partition)
                await ask(broker, "XADD", stream, "*", "data", "2", "id", moves, "key", "ada")
            return await search(message_id, topic, partition, due)

        monkeypatch.setattr(finder, "_find_delayed", find_delayed)
        assert await finder.find(str(stored), topic)
        assert not searched
        found = await finder.find(str(moves), topic)
        assert found is not None
        assert found.message.data == b"2"
        assert moves in searched


async def test_delayed_message_is_found_while_others_become_due(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked at page by page, and what leaves from the front must not move it past the next page."""
    monkeypatch.setattr(finder_module, "PAGE", 3)
    async with broker:
        refs = [await broker.publish("orders", n, key="ada", delay=f"{n + 1}h") for n in range(12)]
        delayed = broker.keys.delayed("orders", refs[0].partition_number)
        for ref in refs:  # as outputs of handlers, which are not remembered under their ids
            await ask(broker, "DEL", broker.keys.dedup("orders", ref.partition_number, ref))

        async def call_and_release(*given: Any) -> Any:
            reply = await FIND_DELAYED(*given)
            await ask(broker, "ZPOPMIN", delayed)
            return reply

        monkeypatch.setattr(finder_module, "FIND_DELAYED", call_and_release)
        found = await Finder(broker.client, broker.keys).find(str(refs[3]), await topic_of(broker), "ada")
        assert found is not None
        assert found.message.data == b"3"


async def test_look_says_that_a_message_has_expired(broker: Broker) -> None:
    """What is dropped is settled or expired: nothing tells which. What waits does not start any more. Not before its
    time, and a message that becomes a dead letter is that or was settled."""
    async with broker:
        dropped = await broker.publish("late", 1, key="ada", expires="1ms")
        buried = await broker.publish("late", 2, key="ada", expires="1ms", on_expiry="dead")
        lives = await broker.publish("late", 3, key="ada", expires="1h")
        stream = broker.keys.stream("late", dropped.partition_number or 0)
        await ask(broker, "XGROUP", "CREATE", stream, "waits", "0")
        await ask(broker, "XGROUP", "CREATE", stream, "is-done", "$")

        async def texts(ref: MessageRef) -> tuple[str, str]:
            waits, is_done = (await broker.look(ref)).group("waits"), (await broker.look(ref)).group("is-done")
            assert waits is not None
            assert is_done is not None
            return waits.text, is_done.text

        async def is_over() -> bool:
            return "expired" in (await texts(buried))[0]

        await until(is_over, "their time is over")
        waits, is_done = await texts(dropped)
        assert re.fullmatch(r"unread, 0 messages before it; it expired at .*, so it does not start .*", waits)
        assert re.fullmatch(r"settled or expired: its time was over at .*", is_done)
        assert (await texts(buried))[1] == "settled"
        assert await texts(lives) == ("unread, 2 messages before it", "settled")


async def test_look_at_random_ids_of_every_state(broker: Broker) -> None:
    """Also expired, cancelled and removed ones; `python -m tests.control.ledger` looks for 100 000."""
    ledger = Ledger(broker)
    async with broker.running():
        await ledger.make(300)
        seen = await ledger.compare(200)
        ledger.release()
    states = {"delayed", "waiting_for_retry", "dead", "settled", "running", "waiting_for_key", "unread"}
    states |= {"cancelled", "removed"}
    assert states <= seen.keys()
