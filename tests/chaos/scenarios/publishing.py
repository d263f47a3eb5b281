"""Publishers that die during a call, delayed messages, ids that are used twice, workers without descriptors."""

from __future__ import annotations

import signal
from datetime import timedelta

import anyio

from rsmq import BrokerError
from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Verdict
from tests.chaos.publisher import PublisherJob
from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.testbed import CALM, Testbed, ask
from tests.chaos.worker import TOPIC


@scenario("A21", injection="five publishers in turn are killed (SIGKILL) inside publish_many of 2000",
          bound="an unconfirmed message is stored once or not at all, in order", is_cheap=True)  # fmt: skip
async def publisher_is_killed(testbed: Testbed) -> Verdict:
    """A part of the last call may be stored."""
    run = await testbed.start(await testbed.shared_server(), workers=2, lease=CALM)
    pause = 0.3 if run.job.bank else 0.05  # or there is more than workers could book, or handle before the verdict
    for turn in range(5):
        publisher = await run.processes.start_publisher(
            PublisherJob(run.job, many=2000, pause=pause, keys=50, seed=testbed.seed * 10 + turn)
        )
        await run.handles(100)
        publisher.kill()
    verdict = await run.verdict()
    assert not verdict.repeats, verdict
    return verdict


@scenario("51", injection="two thousand delayed messages are due within 5 s while workers, which move them, die",
          bound="each is published once", is_cheap=True)  # fmt: skip
async def delayed_while_movers_die(testbed: Testbed) -> Verdict:
    """Moving a message is one script, so a worker cannot die in the middle of it."""
    run = await testbed.start(await testbed.shared_server(), workers=2)
    async with anyio.create_task_group() as together:
        for n in range(2000):
            together.start_soon(_publish_later, run, f"d{n}", 1 + 5 * run.random.random())
    for turn in range(3):
        aim = 400 * (turn + 1)
        await run.until(lambda: len(run.ledger.commits()) >= aim, "some messages are due")  # noqa: B023
        victim = run.busiest()
        victim.kill()
        run.excuse("killed", victim)
        await run.processes.start_workers()
    return await run.verdict()


async def _publish_later(run: ScenarioRun, key: str, seconds: float) -> None:
    try:
        await run.broker.publish(TOPIC, {"key": key, "n": 0}, key=key, delay=timedelta(seconds=seconds))
        run.history.stored.add((key, 0))
    except BrokerError:
        run.history.unknown.add((key, 0))


@scenario("51", injection="a hundred thousand messages are due at once", servers=ONE,
          bound="moved in bounded batches: no lease is lost")  # fmt: skip
async def all_due_at_once(testbed: Testbed) -> Verdict:
    """The workers start when everything is due."""
    run = await testbed.start(await testbed.server(), workers=0)
    for start in range(0, 100_000, 2000):
        async with anyio.create_task_group() as together:
            for n in range(start, start + 2000):
                together.start_soon(_publish_later, run, f"d{n}", 1)
    await run.processes.start_workers(2)
    verdict = await run.verdict(seconds=240)
    assert not verdict.repeats, verdict
    return verdict


@scenario("A22", injection="every message is published twice with its id, while deduplication keys are deleted",
          bound="nothing lost, order kept; duplicates only for deleted keys", servers=ONE)  # fmt: skip
async def dedup_marks_are_deleted(testbed: Testbed) -> Verdict:
    """Only the key of an id shows that the second message is a repeat."""
    server = await testbed.server()
    run = await testbed.start(server, workers=2)
    deleted: set[str] = set()
    for n in range(1000):
        for _ in range(2):
            await run.broker.publish(TOPIC, {"key": f"k{n % 20}", "n": n // 20}, key=f"k{n % 20}", message_id=f"m{n}")
            if run.random.random() < 0.02:
                marks = [key for key in ask(server, "KEYS", "*:dedup:*") if run.random.random() < 0.5]
                deleted |= {mark.decode().rpartition(":")[2] for mark in marks}
                ask(server, "DEL", *marks) if marks else None
        run.history.stored.add((f"k{n % 20}", n // 20))
    run.excuse("its deduplication key was deleted")
    run.history.rewound = "its deduplication key was deleted"  # it is stored twice
    verdict = await run.verdict()
    twice = {each.message for each in verdict.repeats}
    allowed = {(f"k{int(mark[1:]) % 20}", int(mark[1:]) // 20) for mark in deleted}
    assert twice <= allowed, f"stored twice although the key existed: {twice - allowed}"
    return verdict


@scenario("A23", injection="a worker has no free descriptors and its connections are killed, for two leases",
          bound="it recovers by itself", servers=ONE)  # fmt: skip
async def no_descriptors_left(testbed: Testbed) -> Verdict:
    """Every open fails with EMFILE, as after a descriptor leak in the same process."""
    server = await testbed.server()
    run = await testbed.start(server, workers=2)
    victim = run.processes.workers[0]
    run.excuse("had no descriptors")
    async with run.load(seconds=0.005):
        await run.handles(200)
        victim.signal(signal.SIGUSR1)
        await anyio.sleep(0.2)  # until the signal has arrived
        ask(server, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        ask(server, "CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes")
        await anyio.sleep(2 * run.job.lease)  # the shortage is the fault under test
        victim.signal(signal.SIGUSR2)
        done = run.starts_of(victim)
        await run.until(lambda: run.starts_of(victim) > done, "it works again", 30)
        await run.handles(200)
    assert victim.exit_code is None, run.processes.log()
    return await run.verdict()
