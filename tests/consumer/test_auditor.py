"""The audit of a running worker: what others take from it in the server is restored, or at least said."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from rsmq import Broker, Message
from rsmq.consumer import auditor
from rsmq.consumer.auditor import Auditor
from rsmq.consumer.consumer import Consumer
from rsmq.keys import Keys
from rsmq.settings import Settings
from tests.contract.witness import settled
from tests.patience import until

pytestmark = pytest.mark.usefixtures("no_task_left")


class Place:
    """A broker with one partition, a handler that waits until it may go on, and an auditor of the test's own."""

    def __init__(self, settings: Settings, keys: Keys) -> None:
        self.broker = Broker(settings)
        self.keys, self.stream = keys, keys.stream("orders", 0)
        self.go, self.seen = asyncio.Event(), list[bytes]()
        self.broker.handler("orders", group="billing", partitions=1, concurrency=100)(self.handle)

    async def handle(self, _: dict[str, int], message: Message) -> None:
        self.seen.append(message.entry_id)
        await self.go.wait()

    async def call(self, *command: Any) -> Any:
        return await self.broker.client.execute_command(*command)

    async def publish(self, count: int) -> None:
        await self.broker.publish_many("orders", [{"n": n} for n in range(count)])
        await until(lambda: len(self.seen) >= count, "all are in hand")

    async def delete_consumer(self) -> None:
        assert self.broker.worker is not None
        await self.call("XGROUP", "DELCONSUMER", self.stream, "billing", self.broker.worker.member)

    def auditor(self) -> Auditor:
        """Beside the worker's own, which is kept from looking by a long interval."""
        broker, worker = self.broker, self.broker.worker
        assert worker is not None
        return Auditor(broker.client, broker.keys, broker.topics, lambda: worker.consumers)

    @property
    def consumer(self) -> Consumer:
        assert self.broker.worker is not None
        return self.broker.worker.consumers[0]

    @property
    def stats(self) -> Any:
        return self.consumer.stats

    async def pending(self) -> int:
        return int((await self.call("XPENDING", self.stream, "billing"))[0])


@pytest.fixture
def place(settings: Settings, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The worker's own auditor sleeps: the test's looks when it is told to."""
    monkeypatch.setattr(auditor, "SOON", 3600.0)
    return Place(settings.model_copy(update={"lease_ttl": timedelta(seconds=30)}), keys)


async def test_a_deleted_consumer_is_made_good(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """DELCONSUMER: the second look makes pending again what is in hand, says so, and all of it is settled once."""
    async with place.broker.running():
        await place.publish(20)
        audit = place.auditor()
        await audit.restore()
        await place.delete_consumer()
        await audit.restore()
        assert await place.pending() == 0, "one look may meet a settlement on its way"
        await audit.restore()
        assert await place.pending() == 20
        assert place.stats["restored"] == 20
        assert "20 messages in hand" in caplog.text
        place.go.set()
        await settled(place.broker, "orders")
        assert place.stats["not_pending"] == 0
    assert len(place.seen) == 20


async def test_what_was_settled_meanwhile_is_settled_again(place: Place) -> None:
    """Between our asking and our restoring a message is settled: it must not stay pending for ever."""
    async with place.broker.running():
        await place.publish(5)
        audit = place.auditor()
        await place.delete_consumer()
        await audit.restore()
        ask = audit._ask

        async def late(lane: Any, ids: Any, *, restore: bool) -> set[bytes]:
            if restore and not place.go.is_set():
                place.go.set()
                await until(lambda: not lane.held, "all is settled")
            return await ask(lane, ids, restore=restore)

        audit._ask = late  # type: ignore[method-assign]
        await audit.restore()
        assert await place.pending() == 5
        await audit.restore()
        await settled(place.broker, "orders")
    assert len(place.seen) == 5


async def test_what_was_handed_back_is_not_settled(place: Place) -> None:
    """The lane is given away after the restoring: what was not handled stays pending for the next owner."""
    async with place.broker.running():
        await place.publish(5)
        audit = place.auditor()
        await place.delete_consumer()
        await audit.restore()
        await audit.restore()
        assert place.broker.worker is not None
        (lane,) = place.broker.worker.consumers[0].lanes.values()
        lane.is_quiet, held = True, set(lane.held)
        lane.held.clear()
        await audit.restore()
        assert await place.pending() == 5
        lane.held.update(held)
        lane.is_quiet = False
        place.go.set()
        await settled(place.broker, "orders")


async def test_what_somebody_else_has_read_is_taken_over(place: Place) -> None:
    """A read of the last owner that nobody has cut off: they are handled, not kept by somebody who is gone."""
    async with place.broker.running():
        place.go.set()
        await place.publish(1)
        await settled(place.broker, "orders")
        audit = place.auditor()
        await place.broker.pause_group("orders", "billing")
        await until(lambda: all(each.is_paused for each in place.consumer.readers), "it reads nothing")
        await place.consumer._intake.exclude()
        await place.broker.publish("orders", {"n": 7})
        await place.call("XREADGROUP", "GROUP", "billing", "ghost", "STREAMS", place.stream, ">")
        await place.broker.resume_group("orders", "billing")
        await audit.count()
        await until(lambda: len(place.seen) == 2, "it is handled")
        await settled(place.broker, "orders")


async def test_entries_that_others_delete_are_named(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Undelivered ones are a disaster, delivered ones a warning, and the topic's own policy neither."""
    async with place.broker.running():
        place.go.set()
        await place.publish(10)
        await settled(place.broker, "orders")
        audit = place.auditor()
        await audit.count()
        await place.call("XTRIM", place.stream, "MAXLEN", 4)
        await audit.count()
        assert place.stats["deleted"] == 6
        assert [each.levelname for each in caplog.records if each.name == "rsmq.audit"] == ["WARNING"]
        entry = await place.call("XADD", place.stream, "*", "data", "{}")
        await place.call("XDEL", place.stream, entry)
        await audit.count()
        assert place.stats["deleted"] == 7
        assert "will never see" in caplog.text
        await place.broker.topics.change("orders", max_length=100, on_full="trim")
        await place.call("XTRIM", place.stream, "MAXLEN", 0)
        await audit.count()
        assert place.stats["deleted"] == 7


async def test_the_worker_audits_itself(settings: Settings, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A settlement of what is not pending any more is enough to make it look."""
    monkeypatch.setattr(auditor, "SOON", 0.02)
    place = Place(settings, keys)
    async with place.broker.running():
        await place.publish(5)
        await place.delete_consumer()
        place.stats["not_pending"] += 1
        await until(lambda: place.stats["restored"] == 5, "all are pending again")
        place.go.set()
        await settled(place.broker, "orders")
