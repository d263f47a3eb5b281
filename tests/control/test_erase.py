"""`broker.erase`: what the server holds of a key is gone, in each state, and nothing else is."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any

import anyio
import pytest

from rsmq import Broker, ConfigError, Message, Reject, RetryPolicy, Settings
from rsmq.codecs import Offload
from rsmq.control import Erased
from rsmq.control.audit import Audit
from rsmq.redis.topics import cached_topic
from tests.codecs.stores import MemoryStore
from tests.contract.witness import ask, dies, settled
from tests.control.erased import holds, sender
from tests.patience import until

pytestmark = pytest.mark.usefixtures("no_task_left")

SECRET = "gate 7,"


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """Two topics, one with bands."""
    made = Broker(replace(settings, preflight="warn", partitions=2))
    made.topic("sms", str, bands=("urgent", "normal"))
    return made


async def test_a_key_is_erased_in_every_state(broker: Broker) -> None:
    """Unread in one group, settled in another; delayed, parked, dead, with a unique name; in a band. Others stay."""
    sender(broker)
    async with broker.running():
        for key in ("ada", "bob"):
            for what in ("settled", "dead"):
                await broker.publish("push", f"{SECRET} {what} {key}", key=key)
            await broker.publish("push", f"{SECRET} parked {key}", key=key)
            await broker.publish("push", f"{SECRET} behind {key}", key=key)
        await dies(broker, "push", "sender", 2)
        await until(lambda: parked(broker), "two wait for a retry")
    async with broker:
        for key in ("ada", "bob"):
            await broker.publish("push", f"{SECRET} delayed {key}", key=key, delay="1h")
            await broker.publish(
                "push", f"{SECRET} named {key}", key=key, delay="1h", unique=f"cart of {key}", until="2h"
            )
            await broker.publish("push", f"{SECRET} unread {key}", key=key, unique=key)
            await broker.publish("sms", f"{SECRET} urgent {key}", key=key, band="urgent")
            await broker.publish("sms", f"{SECRET} normal {key}", key=key)
        done = await broker.erase("ada", timeout=timedelta(milliseconds=1))
        assert done == Erased(stored=5, delayed=2, dead=1, names=2, running=2), (
            "what a worker had needs a worker to end"
        )
    async with broker.running():
        done = await broker.erase("ada", timeout="20s")
        assert done == Erased(stored=2)
        assert await holds(broker, " ada") == []
        assert len(await holds(broker, " bob")) >= 4
        assert await broker.erase("ada") == Erased()
        (entry,) = [
            each for each in await Audit(broker.client, broker.keys).newest() if each.result.startswith("stored 5")
        ]
        assert entry.what == f"erase key sha256:{hashlib.sha256(b'ada').hexdigest()}"
        assert await ask(broker, "ZCARD", broker.keys.delayed("push", broker_partition(broker, "push", "bob"))) == 2


def broker_partition(broker: Broker, topic: str, key: str) -> int:
    """Where a key is."""
    found = cached_topic(broker.topics, topic)
    assert found is not None
    return found.normal.partition_for(key)


async def parked(broker: Broker) -> bool:
    """Whether two messages wait for their retry."""
    counts = [await ask(broker, "ZCARD", broker.keys.retry("push", number, "sender")) for number in range(2)]
    return sum(counts) == 2


async def test_what_a_handler_works_on_is_waited_for(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    """It goes on, and leaves no dead letter. What waits behind it does not start. None counts as deleted by others."""
    goes_on, began = asyncio.Event(), list[str]()
    caplog.set_level(logging.INFO, "rsmq")

    @broker.handler("push", group="sender", retry=RetryPolicy(max_attempts=1))
    async def send(text: str) -> None:
        began.append(text)
        if text == "first":
            await goes_on.wait()
            raise OSError(text)

    async with broker.running():
        for text in ("first", "second", "third"):
            await broker.publish("push", text, key="ada")
        await until(lambda: began == ["first"], "it runs")
        short = await broker.erase("ada", timeout=timedelta(milliseconds=50))
        assert short.running >= 1
        async with anyio.create_task_group() as tasks:
            results = list[Erased]()

            async def erase() -> None:
                results.append(await broker.erase("ada", timeout="30s"))

            tasks.start_soon(erase)
            await anyio.sleep(0.1)
            goes_on.set()
        assert results[0].running == 0
        assert short.stored + results[0].stored == 3
        await settled(broker, "push")
        await broker.publish("push", "later", key="ada")
        await until(lambda: began == ["first", "later"], "only a new one runs")
        await settled(broker, "push")
        assert broker.worker is not None
        stats = broker.worker.consumers[0].stats
        assert (stats["buried"], stats["lost_body"], stats["deleted"]) == (0, 0, 0)
    assert "deleted by another client" not in caplog.text


async def test_messages_that_are_erased_under_a_worker_are_handled_or_gone(broker: Broker) -> None:
    """While many are read: nothing becomes a dead letter, and those of another key keep their order."""
    seen = list[tuple[str | None, int]]()

    @broker.handler("push", group="sender", partitions=1)
    async def send(number: int, message: Message) -> None:
        seen.append((message.key, number))
        await asyncio.sleep(0)

    async with broker:
        for number in range(300):
            await broker.publish("push", number, key="ada" if number % 2 else "bob")
    async with broker.running():
        done = await broker.erase("ada", timeout="10s")
        await settled(broker, "push")
        assert done.running == 0
        assert done.dead == 0
        assert [number for key, number in seen if key == "bob"] == list(range(0, 300, 2))
        mine = [number for key, number in seen if key == "ada"]
        assert mine == sorted(set(mine))
        assert done.stored == 150
        stats = broker.worker.consumers[0].stats if broker.worker is not None else {}
        assert stats["lost_body"] == 0


async def test_inboxes_of_named_devices_are_emptied(broker: Broker) -> None:
    """Others keep their letters."""
    async with broker:
        for device in ("phone-7", "phone-8"):
            await broker.send(device, "boarding")
        done = await broker.erase("u7", devices=["phone-7"])
        assert done == Erased(letters=1)
        (found,) = await broker.devices.peek("phone-8")
        assert found.data == b"boarding"


async def test_bodies_in_the_store_are_deleted_with_their_messages(broker: Broker) -> None:
    """Of delayed, dead and running messages; those of another key stay, and a store that is away ends nothing."""
    store, goes_on, began = MemoryStore(), asyncio.Event(), list[str]()
    large = Broker(broker.settings, offload=Offload(store, above="1kB"))

    @large.handler("push", group="sender", retry=RetryPolicy(max_attempts=1))
    async def send(text: str) -> None:
        began.append(text[:4])
        if text.startswith("runs"):
            await goes_on.wait()
        raise Reject(text[:4])

    async def publish(what: str, key: str, **options: Any) -> None:
        await large.publish("push", what * 500, key=key, **options)

    async with large, large.running():
        for key in ("ada", "bob"):
            await publish("dead", key)
            await publish("late", key, delay="1h")
        await dies(large, "push", "sender", 2)
        await publish("runs", "ada")
        await until(lambda: began.count("runs") == 1, "it runs")
        assert len(store.names) == 5
        short = await large.erase("ada", timeout=timedelta(milliseconds=300))
        assert (short.stored, short.running, short.bodies, len(store.names)) == (1, 1, 2, 3), "one was dead, and kept"
        goes_on.set()
        done = await large.erase("ada", timeout="20s")
        assert (done.running, done.bodies, len(store.names)) == (0, 1, 2)
        store.is_away = True
        done = await large.erase("bob", timeout="20s")
        assert (done.delayed, done.dead, done.running, done.bodies) == (1, 1, 0, 0)


async def test_wrong_use_is_refused(broker: Broker) -> None:
    """It says what to pass."""
    async with broker:
        with pytest.raises(ConfigError, match="is no ordering key"):
            await broker.erase("")
        with pytest.raises(ConfigError, match="pass a list of client ids"):
            await broker.erase("u7", devices="phone-7")


async def test_answers_and_digests_of_a_key_are_erased(broker: Broker) -> None:
    """An answer that came too late, or was not read; what waits for its window, and the record of the last call."""

    @broker.handler("ask", group="answers", replies=True)
    async def answer(text: str) -> str:
        await anyio.sleep(0.1)
        return text

    @broker.handler("mail", group="digests", batch=10, by="key", linger="1ms")
    async def first(texts: list[str]) -> None: ...

    @broker.handler("news", group="digests", batch=10, by="key", linger="1h")
    async def later(texts: list[str]) -> None: ...

    async with broker.running():
        for key in ("ada", "bob"):
            with pytest.raises(TimeoutError), anyio.fail_after(0.05):  # it is not there to read the answer
                await broker.request("ask", f"{SECRET} asked {key}", key=key, timeout="20s")
            await broker.publish("mail", f"{SECRET} mail {key}", key=key)
            await broker.publish("news", f"{SECRET} news {key}", key=key)
        await settled(broker, "mail")
        await settled(broker, "ask")
        assert len(await holds(broker, "asked ada")) == 2, "the message, and its answer"
        erased = await broker.erase("ada")
        assert (erased.stored, erased.running) == (3, 0)
        assert await holds(broker, " ada") == []
        for partition in range(2):
            for topic in ("mail", "news"):
                calls = broker.keys.calls(topic, partition, "digests")
                assert not await ask(broker, "HEXISTS", calls, "ada")
        assert len(await holds(broker, " bob")) >= 2
