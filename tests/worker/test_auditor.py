"""The audit of a running worker: what other clients delete in the server is restored or at least logged."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rsmq import Broker, BrokerUnavailable, Message, Reject
from rsmq.consumer.consumer import Consumer
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.scripts import RESTORE_PENDING
from rsmq.testing.proxy import Proxy
from rsmq.worker import auditor
from rsmq.worker.auditor import Auditor
from tests.contract.witness import settled
from tests.patience import until
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("no_task_left")


class Scene:
    """A broker with one partition, a handler that waits for an event, and an auditor that the test calls."""

    def __init__(self, settings: Settings, keys: Keys) -> None:
        self.broker = Broker(settings)
        self.keys, self.stream = keys, keys.stream("orders", 0)
        self.go, self.seen = asyncio.Event(), list[bytes]()
        self.error: Exception | None = None
        self.broker.handler("orders", group="billing", partitions=1, concurrency=100)(self.handle)

    async def handle(self, _: dict[str, int], message: Message) -> None:
        self.seen.append(message.entry_id)
        await self.go.wait()
        if self.error is not None:
            raise self.error

    async def call(self, *command: Any) -> Any:
        return await self.broker.client.execute_command(*command)

    async def publish(self, count: int) -> None:
        await self.broker.publish_many("orders", [{"n": n} for n in range(count)])
        await until(lambda: len(self.seen) >= count, "all are in flight")

    async def delete_consumer(self) -> None:
        assert self.broker.worker is not None
        await self.call("XGROUP", "DELCONSUMER", self.stream, "billing", self.broker.worker.member)

    def auditor(self) -> Auditor:
        """One beside the worker's own, which a long interval keeps idle."""
        broker, worker = self.broker, self.broker.worker
        assert worker is not None
        return Auditor(broker.client, broker.keys, broker.topics, worker.consumers)

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
def scene(settings: Settings, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """The worker's own auditor sleeps; the test calls its own."""
    monkeypatch.setattr(auditor, "POLL_INTERVAL", 3600.0)
    return Scene(replace(settings, lease_ttl=timedelta(seconds=30)), keys)


async def test_messages_of_a_deleted_consumer_become_pending_again(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """After DELCONSUMER the second check restores the messages in flight, logs it, and each is settled once."""
    async with scene.broker.running():
        await scene.publish(20)
        audit = scene.auditor()
        await audit.restore()
        await scene.delete_consumer()
        await audit.restore()
        assert await scene.pending() == 0, "one check may cross a settlement"
        await audit.restore()
        assert await scene.pending() == 20
        assert scene.stats["restored"] == 20
        assert "20 messages in flight" in caplog.text
        scene.go.set()
        await settled(scene.broker, "orders")
        assert scene.stats["not_pending"] == 0
    assert len(scene.seen) == 20


@pytest.mark.parametrize("answer", [b"*1\r\n*2\r\n$2\r\nOK\r\n:5\r\n", b"*3\r\n$2\r\nOK\r\n"])
async def test_messages_whose_settlement_is_not_answered_yet_are_not_restored(
    keys: Keys, prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: bytes
) -> None:
    """The server has acknowledged them, or made them dead letters, and the answer is late: no client deleted them."""
    monkeypatch.setattr(auditor, "POLL_INTERVAL", 3600.0)
    patient: Any = {"prefix": prefix, "lease_ttl": "PT30S", "preflight": "warn"}
    with Server(tcp=True) as server:
        async with Proxy(server.port) as proxy:
            scene = Scene(Settings(url=proxy.url, **patient), keys)
            if b":5" not in answer:
                scene.error = Reject("no")
            async with scene.broker.running():
                await scene.publish(5)
                audit = scene.auditor()
                proxy.hold(lambda data: data.startswith(answer))
                scene.go.set()
                await until(lambda: proxy.is_holding, "an answer is late")
                for _ in range(3):
                    await audit.restore()
                assert scene.stats["restored"] == 0
                proxy.release()
                await settled(scene.broker, "orders")
            assert "no longer pending" not in caplog.text


async def test_message_settled_during_the_restoring_is_settled_again(scene: Scene) -> None:
    """A message that is settled between the check and the restoring must not stay pending for ever."""
    async with scene.broker.running():
        await scene.publish(5)
        audit = scene.auditor()
        await scene.delete_consumer()
        await audit.restore()
        ask = audit._not_pending_of

        async def late(lane: Any, ids: Any, *, restore: bool) -> set[bytes]:
            if restore and not scene.go.is_set():
                scene.go.set()
                await until(lambda: not lane.in_flight, "all is settled")
            return await ask(lane, ids, restore=restore)

        audit._not_pending_of = late  # type: ignore[method-assign]
        await audit.restore()
        assert await scene.pending() == 5
        await audit.restore()
        await settled(scene.broker, "orders")
    assert len(scene.seen) == 5


async def test_message_handed_back_after_the_restoring_is_not_settled(scene: Scene) -> None:
    """The lane is handed over after the restoring: unhandled messages stay pending for the next owner."""
    async with scene.broker.running():
        await scene.publish(5)
        audit = scene.auditor()
        await scene.delete_consumer()
        await audit.restore()
        await audit.restore()
        assert scene.broker.worker is not None
        (lane,) = scene.broker.worker.consumers[0].lanes.values()
        lane.is_quiet, held = True, set(lane.in_flight)
        lane.in_flight.clear()
        await audit.restore()
        assert await scene.pending() == 5
        lane.in_flight.update(held)
        lane.is_quiet = False
        scene.go.set()
        await settled(scene.broker, "orders")


async def test_messages_read_by_another_consumer_are_taken_over(scene: Scene) -> None:
    """The previous owner's read was not cut off: the messages are handled although their reader is gone."""
    async with scene.broker.running():
        scene.go.set()
        await scene.publish(1)
        await settled(scene.broker, "orders")
        audit = scene.auditor()
        await scene.broker.pause_group("orders", "billing")
        await until(lambda: all(each.is_paused for each in scene.consumer.fetchers.active), "the fetcher is paused")
        await scene.consumer.fetchers.exclude()
        await scene.broker.publish("orders", {"n": 7})
        await scene.call("XREADGROUP", "GROUP", "billing", "ghost", "STREAMS", scene.stream, ">")
        await scene.broker.resume_group("orders", "billing")
        await audit.count()
        await until(lambda: len(scene.seen) == 2, "it is handled")
        await settled(scene.broker, "orders")


async def test_entries_deleted_by_another_client_are_counted_and_logged(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Undelivered entries are logged as critical, delivered ones as a warning, and trimming by the topic not at all."""
    async with scene.broker.running():
        scene.go.set()
        await scene.publish(10)
        await settled(scene.broker, "orders")
        audit = scene.auditor()
        await audit.count()
        await scene.call("XTRIM", scene.stream, "MAXLEN", 4)
        await audit.count()
        assert scene.stats["deleted"] == 6
        assert [each.levelname for each in caplog.records if each.name == "rsmq.audit"] == ["WARNING"]
        entry = await scene.call("XADD", scene.stream, "*", "data", "{}")
        await scene.call("XDEL", scene.stream, entry)
        await audit.count()
        assert scene.stats["deleted"] == 7
        assert "will never see" in caplog.text
        await scene.broker.topics.change("orders", max_length=100, on_full="trim")
        await scene.call("XTRIM", scene.stream, "MAXLEN", 0)
        await audit.count()
        assert scene.stats["deleted"] == 7


async def test_worker_audits_after_settling_a_message_that_was_not_pending(
    settings: Settings, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a settlement starts a check early, and a second one restores the messages."""
    monkeypatch.setattr(auditor, "POLL_INTERVAL", 0.02)
    scene = Scene(settings, keys)
    async with scene.broker.running():
        await scene.publish(5)
        await scene.delete_consumer()
        scene.stats["not_pending"] += 1
        await until(lambda: scene.stats["restored"] == 5, "all are pending again")
        scene.go.set()
        await settled(scene.broker, "orders")


async def test_message_restored_in_a_lost_reply_is_settled_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit does not know what the lost reply has made pending, so it settles all that it asked for."""
    async with scene.broker.running():
        await scene.publish(5)
        audit = scene.auditor()
        await scene.delete_consumer()
        await audit.restore()

        async def lost(client: Any, names: Any, args: Any) -> Any:
            reply = await RESTORE_PENDING(client, names, args)
            if args[3] and len(reply) > 1:
                scene.go.set()
                await until(lambda: not next(iter(scene.consumer.lanes.values())).in_flight, "all is settled")
                await RESTORE_PENDING(client, names, args)  # as if it had crossed the settlement
                raise BrokerUnavailable("the reply is lost")
            return reply

        monkeypatch.setattr(auditor, "RESTORE_PENDING", lost)
        with pytest.raises(BrokerUnavailable):
            await audit.restore()
        assert await scene.pending() == 5
        await audit.restore()
        await settled(scene.broker, "orders")
    assert len(scene.seen) == 5
