"""Publishers that die inside a call, messages that come later, ids that are given twice; workers that starve."""

from __future__ import annotations

import signal
from datetime import timedelta

import anyio

from rsmq import BrokerError
from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Verdict
from tests.chaos.publisher import Errand
from tests.chaos.scene import Scene
from tests.chaos.stage import Stage, ask
from tests.chaos.worker import TOPIC


@scenario("A21", injection="five publishers in turn are killed (SIGKILL) inside publish_many of 2000",
          bound="what was not confirmed is there or not, once, and in order", is_cheap=True)  # fmt: skip
async def publisher_is_killed(stage: Stage) -> Verdict:
    """Some of a call may be stored."""
    scene = await stage.on(await stage.common(), workers=2)
    for turn in range(5):
        publisher = await scene.crew.send(Errand(scene.job, many=2000, pause=0, keys=50, seed=stage.seed * 10 + turn))
        await scene.handles(100)
        publisher.kill()
    verdict = await scene.verdict()
    assert not verdict.repeats, verdict
    return verdict


@scenario("51", injection="two thousand messages due within five seconds while their movers (the workers) are killed",
          bound="each comes once", is_cheap=True)  # fmt: skip
async def delayed_while_movers_die(stage: Stage) -> Verdict:
    """Moving is one script: dead in between there is none."""
    scene = await stage.on(await stage.common(), workers=2)
    async with anyio.create_task_group() as together:
        for n in range(2000):
            together.start_soon(_publish_later, scene, f"d{n}", 1 + 5 * scene.random.random())
    for turn in range(3):
        aim = 400 * (turn + 1)
        await scene.until(lambda: len(scene.ledger.commits()) >= aim, "some of it is due")  # noqa: B023
        victim = scene.busiest()
        victim.kill()
        scene.excuse("killed", victim)
        await scene.crew.hire()
    return await scene.verdict()


async def _publish_later(scene: Scene, key: str, seconds: float) -> None:
    try:
        await scene.broker.publish(TOPIC, {"key": key, "n": 0}, key=key, delay=timedelta(seconds=seconds))
        scene.story.stored.add((key, 0))
    except BrokerError:
        scene.story.unknown.add((key, 0))


@scenario("51", injection="a hundred thousand messages are due at once", servers=ONE,
          bound="moved in bounded batches: no lease is lost")  # fmt: skip
async def all_due_at_once(stage: Stage) -> Verdict:
    """Nobody looks for a while, then everything is due."""
    scene = await stage.on(await stage.server(), workers=0)
    for start in range(0, 100_000, 2000):
        async with anyio.create_task_group() as together:
            for n in range(start, start + 2000):
                together.start_soon(_publish_later, scene, f"d{n}", 1)
    await scene.crew.hire(2)
    verdict = await scene.verdict(seconds=240)
    assert not verdict.repeats, verdict
    return verdict


@scenario("A22", injection="every message is published twice with its id, while the marks of ids are deleted by hand",
          bound="nothing lost, order kept; only a deleted mark lets a duplicate through", servers=ONE)  # fmt: skip
async def dedup_marks_are_deleted(stage: Stage) -> Verdict:
    """The mark is all that tells the second from the first."""
    server = await stage.server()
    scene = await stage.on(server, workers=2)
    deleted: set[str] = set()
    for n in range(1000):
        for _ in range(2):
            await scene.broker.publish(TOPIC, {"key": f"k{n % 20}", "n": n // 20}, key=f"k{n % 20}", message_id=f"m{n}")
            if scene.random.random() < 0.02:
                marks = [key for key in ask(server, "KEYS", "*:dedup:*") if scene.random.random() < 0.5]
                deleted |= {mark.decode().rpartition(":")[2] for mark in marks}
                ask(server, "DEL", *marks) if marks else None
        scene.story.stored.add((f"k{n % 20}", n // 20))
    scene.excuse("its mark was deleted")
    scene.story.rewound = "its mark was deleted"  # it is stored twice
    verdict = await scene.verdict()
    twice = {each.message for each in verdict.repeats}
    allowed = {(f"k{int(mark[1:]) % 20}", int(mark[1:]) // 20) for mark in deleted}
    assert twice <= allowed, f"stored twice although the mark was there: {twice - allowed}"
    return verdict


@scenario("A23", injection="a worker may open no more descriptors, and its connections are killed, for two leases",
          bound="it comes back by itself", servers=ONE)  # fmt: skip
async def no_descriptors_left(stage: Stage) -> Verdict:
    """EMFILE to everything: somebody else in its process has leaked them."""
    server = await stage.server()
    scene = await stage.on(server, workers=2)
    victim = scene.crew.hands[0]
    scene.excuse("starved")
    async with scene.load(seconds=0.005):
        await scene.handles(200)
        victim.signal(signal.SIGUSR1)
        await anyio.sleep(0.2)  # until the signal has arrived
        ask(server, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        ask(server, "CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes")
        await anyio.sleep(2 * scene.job.lease)  # the shortage is the fault under test
        victim.signal(signal.SIGUSR2)
        done = scene.starts_of(victim)
        await scene.until(lambda: scene.starts_of(victim) > done, "it works again", 30)
        await scene.handles(200)
    assert victim.exit_code is None, scene.crew.log()
    return await scene.verdict()
