"""Entries that other clients delete before they are settled: each becomes a dead letter, whatever gets lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

import anyio
import pytest

from rsmq import Broker, BrokerUnavailable, Retry, Settings
from rsmq.consumer.reading import reclaimer
from rsmq.consumer.settling.settler import Settler
from rsmq.redis.scripts import ADOPT_PENDING, CLAIM_PENDING, START_MESSAGE, UNPARK_MESSAGES
from tests.contract.witness import ask, settled
from tests.patience import until

SHORT: dict[str, Any] = {"partitions": 1, "lease_ttl": timedelta(seconds=2), "preflight": "warn"}


class LosesFirst:
    """A script whose first reply with anything in it gets lost, after the server has run it."""

    def __init__(self, script: Any) -> None:
        self._script = script
        self.is_lost = False

    async def __call__(self, *args: Any) -> Any:
        reply = await self._script(*args)
        if not self.is_lost and len(reply) > 2 and any(reply[2:]):
            self.is_lost = True
            raise BrokerUnavailable("the reply is lost")
        return reply


async def lost_bodies(broker: Broker) -> Counter[bytes]:
    """How many dead letters each deleted entry has."""
    rows = await ask(broker, "XRANGE", broker.keys.dlq("t", 0, "g"), "-", "+")
    letters = [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in rows]
    return Counter(each[b"dlq.origin"] for each in letters if each[b"dlq.reason"] == b"lost-body")


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_deleted_entries_in_a_claim_whose_reply_is_lost_become_dead_letters(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, distribution: Any
) -> None:
    """The claim takes them off the pending list, so only the claim itself can write them down."""
    name, script = ("CLAIM_PENDING", CLAIM_PENDING) if distribution == "hash" else ("ADOPT_PENDING", ADOPT_PENDING)
    broker, claim = Broker(replace(settings, **SHORT)), LosesFirst(script)
    monkeypatch.setattr(reclaimer, name, claim)
    ids = await left_by_a_dead_member(broker, 8)
    async with broker:
        await ask(broker, "XDEL", broker.keys.stream("t", 0), *ids[:6])
    seen = list[int]()

    @broker.handler("t", group="g", distribution=distribution, ordering="none")
    async def handle(order: dict[str, int]) -> None:
        seen.append(order["n"])

    async with broker.running():
        await settled(broker, "t")
        assert claim.is_lost
        assert sorted(set(seen)) == [6, 7]
        assert await lost_bodies(broker) == dict.fromkeys(ids[:6], 1)


async def left_by_a_dead_member(broker: Broker, count: int) -> list[bytes]:
    """The ids of messages that a member without a heartbeat has had for a day."""
    async with broker:
        await broker.topics.ensure("t", 1)
        stream = broker.keys.stream("t", 0)
        await ask(broker, "XGROUP", "CREATE", stream, "g", "0", "MKSTREAM")
        await broker.publish_many("t", [{"n": n} for n in range(count)])
        ((_, entries),) = await ask(broker, "XREADGROUP", "GROUP", "g", "dead", "STREAMS", stream, ">")
        ids = [entry_id for entry_id, _ in entries]
        await ask(broker, "XCLAIM", stream, "g", "dead", 0, *ids, "IDLE", 86_400_000, "JUSTID")
    return ids


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_deleted_entry_in_an_unparking_whose_reply_is_lost_becomes_a_dead_letter(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, distribution: Any
) -> None:
    """A message without order waits for its retry outside the pending list: the script drops it from the retry set."""
    broker, call = Broker(replace(settings, **SHORT)), Settler.ask
    unpark = LosesFirst(call)

    async def ask_script(settler: Settler, script: Any, *command: Any) -> Any:
        return await (unpark if script is UNPARK_MESSAGES else call)(settler, script, *command)

    monkeypatch.setattr(Settler, "ask", ask_script)
    broker.handler("t", group="g", distribution=distribution, ordering="none")(ignore)
    async with broker.running():
        stream, retry = broker.keys.stream("t", 0), broker.keys.retry("t", 0, "g")
        await broker.publish("t", {})
        await settled(broker, "t")
        ((entry_id, _),) = await ask(broker, "XRANGE", stream, "-", "+")
        await ask(broker, "XDEL", stream, entry_id)
        assert broker.worker is not None
        (lane,) = broker.worker.consumers[0].lanes.values()
        await ask(broker, "ZADD", retry, 1, entry_id + b"|1")
        lane.recovery.retry_at = 0.0
        await until(lambda: unpark.is_lost, "the reply is lost")
        await settled(broker, "t")
        assert await lost_bodies(broker) == {entry_id: 1}


async def test_deleted_entry_that_unparking_and_its_timer_find_at_once_has_one_dead_letter(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With key order a timer starts the message when it is due; the retry poller sees it, too."""
    broker, is_unparked, is_asked = Broker(replace(settings, **SHORT)), anyio.Event(), anyio.Event()

    @broker.handler("t", group="g")
    async def handle(order: dict[str, int]) -> None:
        raise Retry(after=timedelta(seconds=1))

    async with broker.running():
        assert broker.worker is not None
        (consumer,) = broker.worker.consumers
        call = consumer.settler._batcher.ask

        async def start_after_unparking(script: Any, *command: Any) -> Any:
            if script is START_MESSAGE:
                await is_unparked.wait()
            reply = await call(script, *command)
            if script is START_MESSAGE:
                is_asked.set()
            elif script is UNPARK_MESSAGES and reply[2:]:
                is_unparked.set()
                await is_asked.wait()
            return reply

        monkeypatch.setattr(consumer.settler._batcher, "ask", start_after_unparking)
        await broker.publish("t", {}, key="k")
        (lane,) = consumer.lanes.values()
        await until(lambda: lane.flows.parked, "it waits for its retry")
        ((entry_id, _),) = await ask(broker, "XRANGE", lane.stream, "-", "+")
        await ask(broker, "XDEL", lane.stream, entry_id)
        lane.recovery.retry_at = 0.0
        await until(is_asked.is_set, "both have found it")
        await settled(broker, "t")
        await until(lambda: not lane.in_flight, "the timer has let go of it")
        assert await lost_bodies(broker) == {entry_id: 1}


async def ignore(order: dict[str, int]) -> None:
    """Succeeds."""
