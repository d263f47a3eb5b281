"""Workers that die, sleep, stop, come and go, under load."""

from __future__ import annotations

import time
from dataclasses import replace

import anyio

from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Verdict
from tests.chaos.publisher import Errand
from tests.chaos.stage import Stage, paused

BOTH = ({"distribution": "hash"}, {"distribution": "shared"})


@scenario("1", injection="SIGKILL of the busiest of three workers",
          bound="work elsewhere long before the lease of 30 s", variants=BOTH, is_cheap=True)  # fmt: skip
async def sigkill(stage: Stage, distribution: str) -> Verdict:
    """Its messages run elsewhere long before its lease is over."""
    scene = await stage.on(await stage.common(), lease=30, distribution=distribution, prefetch=4000)
    async with scene.load(seconds=0.01):
        await scene.handles(200)
        await scene.burst(6000, seconds=0.004)
        victim = scene.busiest()
        victim.kill()
        killed = time.monotonic()
        scene.excuse("killed", victim)
        scene.story.most_repeats = scene.job.prefetch
        await scene.handles(600)
    verdict = await scene.verdict(seconds=20)
    assert scene.recovery(victim, killed) < 20
    return verdict


@scenario("2", injection="SIGKILL of all workers but one", bound="it drains alone", servers=ONE)
async def all_but_one(stage: Stage) -> Verdict:
    """Four workers, three of them killed in the same moment."""
    scene = await stage.on(await stage.common(), workers=4)
    async with scene.load(seconds=0.005):
        await scene.handles(300)
        victims = scene.crew.hands[:3]
        for victim in victims:
            victim.kill()
        scene.excuse("killed", *victims)
        await scene.heals()
        await scene.handles(300)
    return await scene.verdict()


@scenario("3", injection="each worker of one slot is killed 0.3 s after it serves, twenty times",
          bound="no innocent dead letter", servers=ONE)  # fmt: skip
async def crash_loop_from_outside(stage: Stage) -> Verdict:
    """Whoever replaces the killed one is killed as well."""
    scene = await stage.on(await stage.common(), workers=1)
    async with scene.load(seconds=0.005, burst=10):
        for _ in range(20):
            (victim,) = await scene.crew.hire()
            await anyio.sleep(0.3)  # the rhythm of the fault
            victim.kill()
            scene.excuse("killed", victim)
        await scene.handles(100)
    return await scene.verdict()


@scenario("4", injection="SIGTERM under load", bound="no message is started twice", variants=BOTH, is_cheap=True)
async def sigterm(stage: Stage, distribution: str) -> Verdict:
    """What runs is finished, the rest is handed back: no duplicate at all."""
    scene = await stage.on(await stage.common(), distribution=distribution)
    async with scene.load(seconds=0.02):
        for _ in range(2):
            await scene.handles(150)
            leaver = scene.busiest()
            leaver.terminate()
            assert await leaver.ended() == 0, scene.crew.log()
            await scene.crew.hire()
        await scene.handles(150)
    verdict = await scene.verdict()
    assert not verdict.findings, verdict
    starts = [(e.key, e.n, e.attempt) for e in scene.ledger.events() if e.what == "start"]
    assert len(starts) == len(set(starts)), "a message was started twice"
    return verdict


@scenario("5", injection="SIGTERM while a handler needs far longer than the grace of 1 s",
          bound="it runs elsewhere at once, and no attempt is counted", variants=BOTH, is_cheap=True)  # fmt: skip
async def sigterm_with_an_endless_handler(stage: Stage, distribution: str) -> Verdict:
    """The message is given back, not lost and not charged."""
    scene = await stage.on(await stage.common(), workers=2, distribution=distribution, stop_grace=1, lease=6)
    gate = scene.ledger.path.with_suffix(".gate")
    name = await scene.publish("slow", do="wait", path=str(gate))
    leaver = scene.hand_of(await scene.begins(name))
    leaver.terminate()
    assert await leaver.ended() == 0, scene.crew.log()
    gate.touch()
    ended = time.monotonic()
    await scene.until(lambda: name in scene.ledger.commits(), "it is handled elsewhere", 20)
    scene.recovered = time.monotonic() - ended
    starts = [event for event in scene.ledger.events() if event.what == "start" and event.pid != leaver.pid]
    assert [event.attempt for event in starts] == [1], "the planned stop was counted as an attempt"
    return await scene.verdict()


@scenario("6", injection="SIGSTOP for a third of the lease, twice", bound="no duplicate, no rebalance", is_cheap=True)
async def nap(stage: Stage) -> Verdict:
    """A pause shorter than the lease costs nothing."""
    scene = await stage.on(await stage.common())
    async with scene.load(seconds=0.01):
        await scene.handles(200)
        for _ in range(2):
            await paused(scene.busiest(), 0.35 * scene.job.lease)
            await scene.handles(100)
    verdict = await scene.verdict()
    assert not verdict.repeats, verdict
    settled = sum(event.what == "settle" for event in scene.ledger.events())
    assert settled > verdict.handled / 2, f"the notary has seen {settled} settlements of {verdict.handled}"
    return verdict


@scenario("7, 8", injection="SIGSTOP for two leases", bound="what it does when awake is refused", variants=BOTH,
          is_cheap=True)  # fmt: skip
async def long_pause(stage: Stage, distribution: str) -> Verdict:
    """A worker that sleeps for two leases is replaced; awake again it spoils nothing."""
    scene = await stage.on(await stage.common(), distribution=distribution)
    async with scene.load(seconds=0.01):
        await scene.handles(200)
        victim = scene.busiest()
        since = time.monotonic()
        scene.excuse("paused", victim)
        await paused(victim, 2 * scene.job.lease)
        await scene.handles(300)
    scene.recovery(victim, since)
    return await scene.verdict()


@scenario("50", injection="one worker, four, one: SIGTERM", bound="no duplicate, everybody works", is_cheap=True)
async def scale_up_and_down(stage: Stage) -> Verdict:
    """From one worker to four and back to one, under ordered load."""
    scene = await stage.on(await stage.common(), workers=1)
    async with scene.load(seconds=0.005):
        await scene.handles(100)
        await scene.crew.hire(3)
        await scene.until(lambda: scene.ledger.pids("commit") == scene.crew.pids, "all four have work")
        await scene.handles(100)
        for leaver in scene.crew.hands[:3]:
            leaver.terminate()
        for leaver in scene.crew.hands[:3]:
            assert await leaver.ended() == 0, scene.crew.log()
        await scene.handles(200)
    verdict = await scene.verdict()
    assert not verdict.findings, verdict
    return verdict


@scenario("50", injection="one worker, ten, one: SIGTERM and SIGKILL mixed, at random", servers=ONE)
async def scale_to_ten_with_losses(stage: Stage) -> Verdict:
    """Some of those who go are killed, some leave in order."""
    scene = await stage.on(await stage.common(), workers=1)
    async with scene.load(seconds=0.005):
        await scene.handles(100)
        await scene.crew.hire(9)
        await scene.handles(200)
        leavers = scene.random.sample(scene.crew.hands, 9)
        for leaver in leavers:
            if scene.random.random() < 0.5:
                leaver.kill()
                scene.excuse("killed", leaver)
            else:
                leaver.terminate()
            await anyio.sleep(scene.random.random() * 0.3)  # the rhythm of the fault
        for leaver in leavers:
            await leaver.ended()
        await scene.heals()
        await scene.handles(200)
    return await scene.verdict()


@scenario("17", injection="one worker starts and stops its broker thirty times under load, then serves",
          bound="no hang; what a cancelled read had fetched is handled", is_cheap=True)  # fmt: skip
async def start_and_stop(stage: Stage) -> Verdict:
    """Stopping while reading, again and again."""
    scene = await stage.on(await stage.common(), workers=1, cycles=0)
    async with scene.load(seconds=0.002):
        await scene.handles(50)
        await scene.crew.hire(1, replace(scene.job, cycles=30))
        await scene.handles(100)
    verdict = await scene.verdict()
    assert not verdict.repeats, verdict
    return verdict


@scenario("A1", injection="members join and are killed or leave without a pause, for some seconds",
          bound="the partitions come to rest", servers=ONE)  # fmt: skip
async def comings_and_goings(stage: Stage) -> Verdict:
    """A deployment that never comes to rest: twelve short lives beside one worker that stays."""
    scene = await stage.on(await stage.common(), workers=1)
    async with scene.load(seconds=0.005, burst=10):
        lives = [scene.crew.start() for _ in range(3)]
        for _ in range(9):
            await anyio.sleep(scene.random.random() * 0.6)  # the rhythm of the fault
            leaver = lives.pop(scene.random.randrange(len(lives)))
            if scene.random.random() < 0.6:
                leaver.kill()
                scene.excuse("killed", leaver)
            elif leaver.pid in scene.ledger.pids("ready"):
                leaver.terminate()
            else:
                lives.append(leaver)
                continue
            lives.append(scene.crew.start())
        await scene.crew.ready([hand for hand in lives if hand.exit_code is None])
        await scene.heals()
        await scene.handles(200)
    return await scene.verdict()


@scenario("A2", injection="two processes with one member id", bound="nothing lost; order is lost", servers=ONE)
async def one_name_for_two(stage: Stage) -> Verdict:
    """rsmq makes ids that are unique per boot; this one is forced, as a restored snapshot of a machine would."""
    scene = await stage.on(await stage.common(), workers=2, member="twin")
    scene.excuse("has a twin")
    scene.story.rewound = "twins settle for each other"
    scene.story.is_ordered = False
    async with scene.load(seconds=0.005):
        await scene.handles(300)
        await scene.crew.hire(1)
        scene.excuse("has a twin")
        await scene.handles(300)
    return await scene.verdict()


@scenario("A3", injection="a worker and the publisher's process are stopped (SIGSTOP) at the same time, for two leases")
async def both_sides_sleep(stage: Stage) -> Verdict:
    """Nobody publishes, one partition owner sleeps; both wake at once."""
    scene = await stage.on(await stage.common(), workers=2)
    publisher = await scene.crew.send(Errand(scene.job, many=20, seed=stage.seed))
    await scene.handles(300)
    victim = scene.busiest()
    scene.excuse("paused", victim)
    publisher.pause()
    await paused(victim, 2 * scene.job.lease)
    publisher.resume()
    await scene.heals()
    await scene.handles(300)
    return await scene.verdict()


@scenario("A4", injection="the worker's log is /dev/full: every line it writes fails", servers=ONE, is_cheap=True)
async def the_log_is_full(stage: Stage) -> Verdict:
    """A worker that cannot log works all the same."""
    scene = await stage.on(await stage.common(), workers=0, log="/dev/full")
    await scene.crew.hire(2)
    async with scene.load(seconds=0.005):
        await scene.handles(200)
        leaver = scene.busiest()
        leaver.terminate()
        assert await leaver.ended() == 0
        await scene.handles(100)
    return await scene.verdict()
