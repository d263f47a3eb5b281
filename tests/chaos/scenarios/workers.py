"""Workers that are killed, paused, stopped and added under load."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import replace

import anyio

from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Verdict
from tests.chaos.publisher import PublisherJob
from tests.chaos.supervised import SupervisedJob
from tests.chaos.testbed import CALM, Testbed, paused

BOTH = ({"distribution": "hash"}, {"distribution": "shared"})


@scenario("1", injection="SIGKILL of the busiest of three workers",
          bound="other workers handle its messages long before its lease of 30 s ends", variants=BOTH,
          is_cheap=True)  # fmt: skip
async def sigkill(testbed: Testbed, distribution: str) -> Verdict:
    """Other workers handle its messages long before its lease is over."""
    run = await testbed.start(await testbed.shared_server(), lease=30, distribution=distribution, prefetch=4000)
    async with run.load(seconds=0.01):
        await run.handles(200)
        await run.backlog(6000, seconds=0.004)
        victim = run.busiest()
        victim.kill()
        killed = time.monotonic()
        run.excuse("killed", victim)
        run.history.most_repeats = run.job.prefetch
        await run.handles(600)
    verdict = await run.verdict(seconds=20)
    assert run.recovery(victim.pid, killed) < 20
    return verdict


@scenario("A32", injection="children of `rsmq worker --processes 3` are killed under load: one, another, two at once; "
          "at last their parent; `wrong`: all the time the parent says of every child that it has ended",
          bound="the others handle their messages long before the grace of 30 s and the lease of 60 s end; "
          "no child that runs loses a partition",
          variants=({"parent": "right"}, {"parent": "wrong"}), is_cheap=True)  # fmt: skip
async def supervised_children_are_killed(testbed: Testbed, parent: str) -> Verdict:
    """The supervisor says which process has ended; the server says whether that is so."""
    patience = {"presence_grace": "PT30S"}
    run = await testbed.start(await testbed.shared_server(), workers=0, lease=60, prefetch=4000, more=patience)
    run.history.most_repeats = run.job.prefetch
    job = SupervisedJob(run.job, processes=3, lies=parent == "wrong")

    async def serve(count: int) -> set[int]:
        """Wait until so many children serve that were not killed."""
        await run.until(lambda: len(run.ledger.pids("ready") - killed) == count, f"{count} children serve")
        return run.ledger.pids("ready") - killed

    killed = set[int]()
    run.processes.start_worker(job)
    await serve(3)
    async with run.load(seconds=0.01):
        for count in (1, 1, 2) if run.seconds else (1, 2):
            await run.handles(200)
            await run.backlog(3000, seconds=0.004)
            children, starts = await serve(3), Counter(run.ledger.open_starts().values())
            victims = sorted(children, key=lambda pid: -starts[pid])[:count]
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            since = run.now()
            killed |= set(victims)
            run.history.excused |= dict.fromkeys(victims, "killed")
            await serve(3)
            await run.handles(300)
            assert max(run.recovery(victim, since) for victim in victims) < 25
        run.processes.workers[0].kill()  # the children see that, and stop
        # no parent tells the new children which members have ended, so they wait for the grace: let it be the usual one
        run.processes.start_worker(replace(job, processes=1, job=replace(run.job, more={})))
        await run.handles(300)
    return await run.verdict()


@scenario("2", injection="SIGKILL of all workers but one", bound="one worker drains the backlog", servers=ONE)
async def all_but_one(testbed: Testbed) -> Verdict:
    """Four workers, three of them killed at the same time."""
    run = await testbed.start(await testbed.shared_server(), workers=4)
    async with run.load(seconds=0.005):
        await run.handles(300)
        victims = run.processes.workers[:3]
        for victim in victims:
            victim.kill()
        run.excuse("killed", *victims)
        await run.recovers()
        await run.handles(300)
    return await run.verdict()


@scenario("3", injection="a worker is killed 0.3 s after it serves, and so is its replacement, twenty times",
          bound="no dead letter", servers=ONE)  # fmt: skip
async def crash_loop_from_outside(testbed: Testbed) -> Verdict:
    """Each replacement is killed as well."""
    run = await testbed.start(await testbed.shared_server(), workers=1)
    async with run.load(seconds=0.005, burst=10):
        for _ in range(20):
            (victim,) = await run.processes.start_workers()
            await anyio.sleep(0.3)  # the rhythm of the fault
            victim.kill()
            run.excuse("killed", victim)
        await run.handles(100)
    return await run.verdict()


@scenario("4", injection="SIGTERM under load", bound="no message is started twice", variants=BOTH, is_cheap=True)
async def sigterm(testbed: Testbed, distribution: str) -> Verdict:
    """Running handlers finish, the other messages are given back: no duplicate."""
    run = await testbed.start(await testbed.shared_server(), distribution=distribution, lease=CALM)
    async with run.load(seconds=0.02):
        for _ in range(2):
            await run.handles(150)
            leaver = run.busiest()
            leaver.terminate()
            assert await leaver.ended() == 0, run.processes.log()
            await run.processes.start_workers()
        await run.handles(150)
    verdict = await run.verdict()
    assert not verdict.findings, verdict
    starts = [(e.key, e.n, e.attempt) for e in run.ledger.events() if e.what == "start"]
    assert len(starts) == len(set(starts)), "a message was started twice"
    return verdict


@scenario("5", injection="SIGTERM while a handler needs far longer than the grace of 1 s",
          bound="another worker handles it at once; no attempt is counted", variants=BOTH, is_cheap=True)  # fmt: skip
async def sigterm_with_an_endless_handler(testbed: Testbed, distribution: str) -> Verdict:
    """The message is given back without counting the attempt."""
    run = await testbed.start(
        await testbed.shared_server(), workers=2, distribution=distribution, stop_grace=1, lease=6
    )
    gate = run.ledger.path.with_suffix(".gate")
    name = await run.publish("slow", do="wait", path=str(gate))
    leaver = run.worker_of(await run.begins(name))
    leaver.terminate()
    assert await leaver.ended() == 0, run.processes.log()
    gate.touch()
    ended = time.monotonic()
    await run.until(lambda: name in run.ledger.commits(), "it is handled elsewhere", 20)
    run.recovered = time.monotonic() - ended
    starts = [event for event in run.ledger.events() if event.what == "start" and event.pid != leaver.pid]
    assert [event.attempt for event in starts] == [1], "the planned stop was counted as an attempt"
    return await run.verdict()


@scenario("6", injection="SIGSTOP for a third of the lease, twice", bound="no duplicate, no rebalance", is_cheap=True)
async def nap(testbed: Testbed) -> Verdict:
    """A pause shorter than the lease has no effect."""
    run = await testbed.start(await testbed.shared_server(), lease=CALM)
    async with run.load(seconds=0.01):
        await run.handles(200)
        for _ in range(2):
            await paused(run.busiest(), 0.35 * run.job.lease)
            await run.handles(100)
    verdict = await run.verdict()
    assert not verdict.repeats, verdict
    settled = sum(event.what == "settle" for event in run.ledger.events())
    assert settled > verdict.handled / 2, f"only {settled} settlements of {verdict.handled} were recorded"
    return verdict


@scenario("7, 8", injection="SIGSTOP for two leases", bound="its writes after the pause are refused", variants=BOTH,
          is_cheap=True)  # fmt: skip
async def long_pause(testbed: Testbed, distribution: str) -> Verdict:
    """A worker that is paused for two leases is replaced; its late writes have no effect."""
    run = await testbed.start(await testbed.shared_server(), distribution=distribution)
    async with run.load(seconds=0.01):
        await run.handles(200)
        victim = run.busiest()
        since = time.monotonic()
        run.excuse("paused", victim)
        await paused(victim, 2 * run.job.lease)
        await run.handles(300)
    run.recovery(victim.pid, since)
    return await run.verdict()


@scenario(
    "50",
    injection="from one worker to four and back (SIGTERM)",
    bound="no duplicate, every worker handles messages",
    is_cheap=True,
)
async def scale_up_and_down(testbed: Testbed) -> Verdict:
    """From one worker to four and back to one, under ordered load."""
    run = await testbed.start(await testbed.shared_server(), workers=1, lease=CALM)
    async with run.load(seconds=0.005):
        await run.handles(100)
        await run.processes.start_workers(3)
        await run.until(lambda: run.ledger.pids("commit") == run.processes.pids, "all four have messages")
        await run.handles(100)
        for leaver in run.processes.workers[:3]:
            leaver.terminate()
        for leaver in run.processes.workers[:3]:
            assert await leaver.ended() == 0, run.processes.log()
        await run.handles(200)
    verdict = await run.verdict()
    assert not verdict.findings, verdict
    return verdict


@scenario("50", injection="from one worker to ten and back (SIGTERM or SIGKILL at random)", servers=ONE)
async def scale_to_ten_with_losses(testbed: Testbed) -> Verdict:
    """Some of the leaving workers are killed, some stop in order."""
    run = await testbed.start(await testbed.shared_server(), workers=1)
    async with run.load(seconds=0.005):
        await run.handles(100)
        await run.processes.start_workers(9)
        await run.handles(200)
        leavers = run.random.sample(run.processes.workers, 9)
        for leaver in leavers:
            if run.random.random() < 0.5:
                leaver.kill()
                run.excuse("killed", leaver)
            else:
                leaver.terminate()
            await anyio.sleep(run.random.random() * 0.3)  # the rhythm of the fault
        for leaver in leavers:
            await leaver.ended()
        await run.recovers()
        await run.handles(200)
    return await run.verdict()


@scenario("17", injection="one worker starts and stops its broker thirty times under load, then serves",
          bound="no hang; messages fetched by a cancelled read are handled", is_cheap=True)  # fmt: skip
async def start_and_stop(testbed: Testbed) -> Verdict:
    """Stopping during a read, many times."""
    run = await testbed.start(await testbed.shared_server(), workers=1, cycles=0, lease=CALM)
    async with run.load(seconds=0.002):
        await run.handles(50)
        await run.processes.start_workers(1, replace(run.job, cycles=30))
        await run.handles(100)
    verdict = await run.verdict()
    assert not verdict.repeats, verdict
    return verdict


@scenario("A1", injection="members join, leave and are killed all the time for some seconds",
          bound="afterwards every partition has an owner", servers=ONE)  # fmt: skip
async def comings_and_goings(testbed: Testbed) -> Verdict:
    """Twelve short-lived workers beside one that stays."""
    run = await testbed.start(await testbed.shared_server(), workers=1)
    async with run.load(seconds=0.005, burst=10):
        lives = [run.processes.start_worker() for _ in range(3)]
        for _ in range(9):
            await anyio.sleep(run.random.random() * 0.6)  # the rhythm of the fault
            leaver = lives.pop(run.random.randrange(len(lives)))
            if run.random.random() < 0.6:
                leaver.kill()
                run.excuse("killed", leaver)
            elif leaver.pid in run.ledger.pids("ready"):
                leaver.terminate()
            else:
                lives.append(leaver)
                continue
            lives.append(run.processes.start_worker())
        await run.processes.ready([worker for worker in lives if worker.exit_code is None])
        await run.recovers()
        await run.handles(200)
    return await run.verdict()


@scenario("A2", injection="two processes with one member id", bound="nothing lost; order is not kept", servers=ONE)
async def one_name_for_two(testbed: Testbed) -> Verdict:
    """rsmq's ids are unique per boot; the same id is forced here, as by a restored machine snapshot."""
    run = await testbed.start(await testbed.shared_server(), workers=2, member="twin")
    run.excuse("shares its member id")
    run.history.rewound = "two processes settle for each other"
    run.history.is_ordered = False
    async with run.load(seconds=0.005):
        await run.handles(300)
        await run.processes.start_workers(1)
        run.excuse("shares its member id")
        await run.handles(300)
    return await run.verdict()


@scenario("A3", injection="a worker and the publisher are paused (SIGSTOP) at the same time, for two leases")
async def both_sides_sleep(testbed: Testbed) -> Verdict:
    """Nothing is published, a partition owner is paused; both resume at the same time."""
    run = await testbed.start(await testbed.shared_server(), workers=2)
    publisher = await run.processes.start_publisher(PublisherJob(run.job, many=20, seed=testbed.seed))
    await run.handles(300)
    victim = run.busiest()
    run.excuse("paused", victim)
    publisher.pause()
    await paused(victim, 2 * run.job.lease)
    publisher.resume()
    await run.recovers()
    await run.handles(300)
    return await run.verdict()


@scenario("A4", injection="the worker's log is /dev/full: every write to it fails", servers=ONE, is_cheap=True)
async def the_log_is_full(testbed: Testbed) -> Verdict:
    """A worker that cannot log still handles messages."""
    run = await testbed.start(await testbed.shared_server(), workers=0, log="/dev/full")
    await run.processes.start_workers(2)
    async with run.load(seconds=0.005):
        await run.handles(200)
        leaver = run.busiest()
        leaver.terminate()
        assert await leaver.ended() == 0
        await run.handles(100)
    return await run.verdict()


@scenario("A42", injection="messages wait for up to two seconds; SIGKILL of the busiest of two workers, three times, "
          "at any step of what waits, is read again and starts; another one sleeps for two leases",
          bound="each message is handled, in order per key, and none before its time",
          is_cheap=True)  # fmt: skip
async def killed_with_messages_that_wait_for_a_time(testbed: Testbed) -> Verdict:
    """What waits for a time is found by the next owner, with its time."""
    run = await testbed.start(await testbed.shared_server(), workers=2, prefetch=40, waits=2.0)
    for number in range(20 if run.seconds else 3):
        await run.burst(400, keys=100, seconds=0.0002)
        await run.handles(100)
        victim = run.busiest()
        victim.kill()
        run.excuse("killed", victim)
        run.processes.start_worker()
        if number == 1:
            sleeper = run.busiest()
            run.excuse("paused", sleeper)
            await paused(sleeper, 2 * run.job.lease)
    return await run.verdict()


@scenario("A49", injection="a call has all messages of a key that are stored within a second; SIGKILL of the busiest "
          "of two workers, three times, at any step of what waits, begins and is settled; another one sleeps for two "
          "leases",
          bound="each message is handled, in order per key; no call is early or has several keys",
          is_cheap=True)  # fmt: skip
async def killed_while_digests_run(testbed: Testbed) -> Verdict:
    """The next owner finds windows and calls that have begun."""
    run = await testbed.start(await testbed.shared_server(), workers=2, prefetch=400, linger=1.0)
    for number in range(20 if run.seconds else 3):
        await run.burst(400, keys=40, seconds=0.0002)
        await run.handles(100)
        victim = run.busiest()
        victim.kill()
        run.excuse("killed", victim)
        run.processes.start_worker()
        if number == 1:
            sleeper = run.busiest()
            run.excuse("paused", sleeper)
            await paused(sleeper, 2 * run.job.lease)
    return await run.verdict()


@scenario("A38", injection="with room for 40 messages in memory, while 1500 of five keys wait as ids (100 000 in the "
          "long form): SIGKILL of the busiest of two workers, or SIGTERM, or SIGSTOP for two leases, or RST of every "
          "connection, ten times",
          bound="all is handled in order; nothing that waited as an id counts as started",
          variants=({"how": "kill"}, {"how": "stop"}, {"how": "pause"}, {"how": "reset"}), is_cheap=True)  # fmt: skip
async def ids_waiting(testbed: Testbed, how: str) -> Verdict:
    """What waits behind its key has provably not started when its owner ends."""
    server = await testbed.server(tcp=True, aof=False) if how == "reset" else await testbed.shared_server()
    proxy = await testbed.proxy(server) if how == "reset" else None
    lease = 2 if how == "pause" else 30
    url = {} if proxy is None else {"url": proxy.url}
    run = await testbed.start(server, workers=2, lease=lease, prefetch=40, concurrency=8, **url)
    await run.burst(100_000 if run.seconds else 1500, keys=5, seconds=0.0002)
    await run.handles(100)
    victim, struck = run.busiest(), time.monotonic()
    if how == "kill":
        victim.kill()
        run.excuse("killed", victim)
    elif how == "stop":
        victim.terminate()
        assert await victim.ended() == 0, run.processes.log()
    elif how == "pause":
        run.excuse("paused", victim)
        await paused(victim, 2 * lease)
    elif proxy is not None:
        run.excuse("cut off")
        for _ in range(10):
            await run.handles(20)
            proxy.reset()
    if how in ("kill", "pause"):
        run.history.most_repeats = run.job.prefetch
    verdict = await run.verdict(seconds=300 if run.seconds else 40)
    assert how != "kill" or run.recovery(victim.pid, struck) < 20
    return verdict
