"""Another client deletes the entry of a message that is in flight or waits for its retry: it becomes a dead letter."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any

import anyio
import pytest
from tenacity import wait_fixed

from rsmq import Broker, Message, Reject, Retry, RetryPolicy, Settings
from tests.contract.witness import ask, dead, letters_of, settled
from tests.patience import until

pytestmark = pytest.mark.usefixtures("no_task_left")

KINDS: dict[str, dict[str, Any]] = {
    "key": {"ordering": "key"},
    "partition": {"ordering": "partition"},
    "none": {"ordering": "none"},
    "shared": {"distribution": "shared", "ordering": "none"},
    "key in batches": {"ordering": "key", "batch": 10},
    "shared in batches": {"distribution": "shared", "ordering": "none", "batch": 10},
}
LEASED = [kind for kind, options in KINDS.items() if "distribution" not in options]
"""Under shared distribution the touch of the heartbeat finds a deleted entry first, while its handler runs."""
HOWS = {"XDEL": ("XDEL", "{id}"), "XTRIM": ("XTRIM", "MAXLEN", 0)}


class Scene:
    """A broker with one partition, whose handler notes the attempts, waits for `go`, and raises `error`."""

    def __init__(self, settings: Settings, error: Exception | None, **options: Any) -> None:
        # the heartbeat touches what is in flight several times while the handler waits
        quick = {
            "preflight": "warn",
            "partitions": 1,
            "lease_ttl": timedelta(seconds=20),
            "heartbeat": timedelta(seconds=0.1),
        }
        self.broker = Broker(replace(settings, **quick))
        self.error, self.go, self.attempts = error, asyncio.Event(), list[int]()
        retry = RetryPolicy(max_attempts=3, wait=wait_fixed(0.1))
        handle = self.handle_batch if options.get("batch") else self.handle
        self.broker.handler("t", group="g", retry=retry, **options)(handle)

    async def handle(self, _order: dict[str, int], message: Message) -> None:
        self.attempts.append(message.attempt)
        await self.go.wait()
        if self.error is not None:
            raise self.error

    async def handle_batch(self, _orders: list[dict[str, int]], messages: list[Message]) -> None:
        await self.handle({}, messages[0])

    @property
    def stats(self) -> Any:
        assert self.broker.worker is not None
        return self.broker.worker.consumers[0].stats

    async def ask(self, command: str, *args: Any) -> Any:
        return await ask(self.broker, command, self.broker.keys.stream("t", 0), *args)

    async def delete(self, how: str) -> None:
        ((entry_id, _),) = await self.ask("XRANGE", "-", "+")
        command, *args = HOWS[how]
        assert await self.ask(command, *[entry_id if part == "{id}" else part for part in args]) == 1

    async def is_parked(self) -> bool:
        return bool(await ask(self.broker, "ZCARD", self.broker.keys.retry("t", 0, "g")))

    async def beats(self, count: int) -> None:
        """Wait for heartbeats, which touch what is in flight."""
        assert self.broker.worker is not None
        assert self.broker.worker.heartbeat is not None
        heartbeat = self.broker.worker.heartbeat
        for _ in range(count):
            before = heartbeat.last_confirmed
            await until(lambda: heartbeat.last_confirmed > before, "another heartbeat")  # noqa: B023


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", KINDS)
async def test_message_deleted_in_flight_becomes_a_dead_letter_when_it_fails(
    settings: Settings, kind: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its handler fails after the deletion: one dead letter, counted and logged, and nothing is left behind."""
    scene = Scene(settings, ValueError("no"), **KINDS[kind])
    async with scene.broker.running():
        await scene.broker.publish("t", {}, key="k")
        await until(lambda: scene.attempts, "the handler runs")
        await scene.delete(how)
        await scene.beats(3)
        scene.go.set()
        await until(lambda: dead_letters(scene), "it is a dead letter")
        await settled(scene.broker, "t")
        assert await dead(scene.broker, "t", "g") == [("lost-body", None)]
        assert (scene.attempts, scene.stats["lost_body"], await scene.is_parked()) == ([1], 1, False)
    assert [record.levelno for record in caplog.records if "was deleted by another client" in record.getMessage()] == [
        logging.ERROR
    ]


async def dead_letters(scene: Scene) -> bool:
    """Whether there are any."""
    return bool(await letters_of(scene.broker, "t", "g"))


@pytest.mark.parametrize("kind", KINDS)
async def test_message_deleted_while_it_waits_for_its_retry_becomes_a_dead_letter(
    settings: Settings, kind: str
) -> None:
    """It is not handled again, and the later messages of its key go on."""
    scene = Scene(settings, Retry("later", after=timedelta(seconds=1)), **KINDS[kind])
    scene.go.set()
    async with scene.broker.running():
        await scene.broker.publish("t", {}, key="k")
        await until(scene.is_parked, "it waits for its retry")
        await scene.delete("XDEL")
        await until(lambda: dead_letters(scene), "it is a dead letter")
        scene.error = Reject("the next one runs")
        await scene.broker.publish("t", {"n": 2}, key="k")
        await until(lambda: len(scene.attempts) == 2, "the next one of its key runs")
        await settled(scene.broker, "t")
        assert [reason for reason, _ in await dead(scene.broker, "t", "g")] == ["lost-body", "rejected"]
        assert (scene.attempts, scene.stats["lost_body"], await scene.is_parked()) == ([1, 1], 1, False)


@pytest.mark.parametrize("kind", LEASED)
async def test_message_deleted_in_flight_whose_last_attempt_fails_keeps_its_reason(
    settings: Settings, kind: str
) -> None:
    """The dead letter says why it failed, and that its body is gone: it cannot be replayed."""
    scene = Scene(settings, Reject("no"), **KINDS[kind])
    async with scene.broker.running():
        await scene.broker.publish("t", {}, key="k")
        await until(lambda: scene.attempts, "the handler runs")
        await scene.delete("XDEL")
        await scene.beats(3)
        scene.go.set()
        await until(lambda: dead_letters(scene), "it is a dead letter")
        await settled(scene.broker, "t")
        assert await dead(scene.broker, "t", "g") == [("rejected", None)]
        assert scene.stats["lost_body"] == 1
        topic = await scene.broker.topics.find("t")
        assert topic is not None
        assert await scene.broker.dead_letters.replay(topic, "g") == 0
        assert await dead(scene.broker, "t", "g") == [("rejected", None)]


@pytest.mark.parametrize("kind", LEASED)
async def test_message_deleted_in_flight_that_is_handled_leaves_no_dead_letter(settings: Settings, kind: str) -> None:
    """It was received before it was deleted."""
    scene = Scene(settings, None, **KINDS[kind])
    async with scene.broker.running():
        await scene.broker.publish("t", {}, key="k")
        await until(lambda: scene.attempts, "the handler runs")
        await scene.delete("XDEL")
        await scene.beats(3)
        scene.go.set()
        await settled(scene.broker, "t")
        assert await dead(scene.broker, "t", "g") == []


@pytest.mark.parametrize("kind", KINDS)
async def test_message_deleted_before_it_is_handed_back_becomes_a_dead_letter(settings: Settings, kind: str) -> None:
    """A worker that stops hands it back, without its entry: the next one tells."""
    scene = Scene(settings, ValueError("unused"), **KINDS[kind])
    async with scene.broker:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scene.broker.run)
            await until(lambda: scene.broker.worker and scene.broker.worker.is_serving, "it serves")
            await scene.broker.publish("t", {}, key="k")
            await until(lambda: scene.attempts, "the handler runs")
            await scene.delete("XDEL")
            assert scene.broker.worker is not None
            scene.broker.worker.stop(0)
        async with scene.broker.running():
            await until(lambda: dead_letters(scene), "it is a dead letter")
            await settled(scene.broker, "t")
            assert await dead(scene.broker, "t", "g") == [("lost-body", None)]
