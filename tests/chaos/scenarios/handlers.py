"""Handlers that are slow, block, hang, raise, crash or ignore cancellation; messages that cannot be decoded."""

from __future__ import annotations

import json

from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Verdict
from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.testbed import CALM, Testbed, ask
from tests.chaos.worker import GROUP, TOPIC
from tests.servers import Server


@scenario("9", injection="a handler that awaits for three leases", bound="no duplicate start", servers=ONE)
async def slow_handler(testbed: Testbed) -> Verdict:
    """A slow handler is not treated as dead."""
    run = await testbed.start(await testbed.shared_server(), workers=2)
    return await _slow(run, "work", 3)


@scenario("10", injection="a handler that blocks the event loop for two leases", bound="no duplicate start",
          is_cheap=True)  # fmt: skip
async def blocked_event_loop(testbed: Testbed) -> Verdict:
    """The worker keeps its messages: the heartbeat has its own thread."""
    return await _slow(await testbed.start(await testbed.shared_server(), lease=CALM), "block", 2)


async def _slow(run: ScenarioRun, do: str, leases: float) -> Verdict:
    async with run.load(seconds=0.005):
        await run.handles(100)
        slow = await run.publish("k0", do=do, seconds=leases * run.job.lease)
        await run.until(lambda: slow in run.ledger.commits(), "the slow handler ends")
        await run.handles(100)
    verdict = await run.verdict()
    assert not verdict.findings, verdict
    return verdict


@scenario("11", injection="a handler in C code that holds the interpreter lock for two leases",
          bound="inline the worker counts as paused; in a process of its own nothing is repeated",
          variants=({"execution": "inline"}, {"execution": "process"}), servers=ONE)  # fmt: skip
async def the_interpreter_is_held(testbed: Testbed, execution: str) -> Verdict:
    """No thread runs, so the heartbeat stops; `execution="process"` avoids that."""
    run = await testbed.start(await testbed.shared_server(), workers=2, execution=execution, concurrency=4)
    async with run.load(seconds=0.005, burst=4):
        await run.handles(60)
        name = await run.publish("k0", do="hold the GIL", seconds=2 * run.job.lease)
        victim = await run.begins(name)
        if execution == "inline":
            run.excuse("held the lock", run.worker_of(victim))
            run.history.most_repeats = run.job.concurrency
        await run.until(lambda: name in run.ledger.commits(), "the handler ends")
        await run.handles(60)
    return await run.verdict()


@scenario("12", injection="a handler that hangs once, and one that always hangs",
          bound="only the second becomes a dead letter", is_cheap=True)  # fmt: skip
async def hung_handler(testbed: Testbed) -> Verdict:
    """The timeout ends the handler and the message is retried; one that always hangs becomes a dead letter."""
    run = await testbed.start(await testbed.shared_server(), workers=2, timeout=0.5, attempts=3, lease=CALM)
    async with run.load():
        await run.handles(100)
        await run.publish("k1", do="hang once")
        await run.publish_poison("k2", do="hang")
        await run.handles(200)
    verdict = await run.verdict()
    assert not verdict.findings, verdict
    assert [reason for _, reason in run.history.dead] == ["timeout"]
    return verdict


@scenario("13", injection="a third of all messages fail at their first attempt", bound="no dead letter, order kept",
          variants=({"distribution": "hash"}, {"distribution": "shared"}), is_cheap=True)  # fmt: skip
async def handlers_raise(testbed: Testbed, distribution: str) -> Verdict:
    """Retries under load, while a worker is killed."""
    run = await testbed.start(await testbed.shared_server(), distribution=distribution)
    async with run.load(failing=0.3):
        await run.handles(200)
        victim = run.busiest()
        victim.kill()
        run.excuse("killed", victim)
        await run.handles(300)
    return await run.verdict()


@scenario("14", injection="five messages that always fail", bound="each becomes one dead letter after max attempts",
          is_cheap=True)  # fmt: skip
async def poison_that_raises(testbed: Testbed) -> Verdict:
    """The dead letters are exactly the poison and have the error."""
    run = await testbed.start(await testbed.shared_server(), workers=2, attempts=3)
    async with run.load(seconds=0.002):
        await run.handles(50)
        for n in range(5):
            await run.publish_poison(f"k{n}", do="raise")
        await run.handles(200)
    verdict = await run.verdict()
    topic = await run.broker.topics.find(TOPIC)
    assert topic is not None
    letters = [letter async for letter in run.broker.dead_letters.iterate(topic, GROUP)]
    assert {(each.attempts, each.error) for each in letters} == {(3, "ValueError: every attempt fails")}
    return verdict


@scenario("15", injection="two of sixty messages kill their process", bound="exactly those two become dead letters",
          variants=({"do": "exit"}, {"do": "segv"}), is_cheap=True)  # fmt: skip
async def poison_that_kills(testbed: Testbed, do: str) -> Verdict:
    """Other messages in the same process do not become dead letters."""
    run = await testbed.start(await testbed.shared_server(), workers=2, concurrency=8, attempts=3)
    poison = run.random.sample(range(60), 2)
    async with run.processes.supervised():
        for n in range(60):
            if n in poison:
                await run.publish_poison(f"k{n % 7}", do=do)
            else:
                await run.publish(f"k{n % 7}", seconds=0.005)
        await run.until_settled(240)  # six processes have to start and crash, one after the other
    dead = [worker for worker in run.processes.workers if worker.exit_code not in (None, 0)]
    run.excuse("crashed", *dead)
    return await run.verdict()


@scenario("16", injection="SIGTERM while a handler swallows every cancellation", servers=ONE,
          bound="the worker ends within grace and lease; the message is handled elsewhere")  # fmt: skip
async def cancellation_is_swallowed(testbed: Testbed) -> Verdict:
    """`except BaseException: pass` around an await."""
    run = await testbed.start(await testbed.shared_server(), workers=2, stop_grace=0.5)
    name = await run.publish("deaf", do="swallow", seconds=8)
    leaver = run.worker_of(await run.begins(name))
    run.excuse("ignored its cancellation", leaver)
    leaver.terminate()
    assert await leaver.ended(25) == 0, run.processes.log()
    async with run.load():
        await run.handles(50)
    return await run.verdict()


MALFORMED: dict[str, list[object]] = {
    "no data": ["key", "x"],
    "empty names": ["", ""],
    "a field twice": ["data", "{}", "data", "{}"],
    "ten thousand fields": [part for n in range(10_000) for part in (f"f{n}", "v")],
    "no JSON": ["data", b"\xff\xfe\xfd"],
    "a lone string": ["data", '"text"'],
    "a depth bomb": ["data", b"[" * 100_000],
    "a number of 100 000 digits": ["data", b'{"n":' + b"9" * 100_000 + b"}"],
    "headers that are none": ["data", "{}", "h", "[1"],
}


@scenario("18, 19, 20", injection="raw entries: missing, repeated or too many fields, bad UTF-8, deep nesting",
          bound="each becomes a dead letter, all others are handled", is_cheap=True)  # fmt: skip
async def malformed(testbed: Testbed) -> Verdict:
    """Entries that cannot be decoded do not disturb other messages."""
    server = await testbed.shared_server()
    run = await testbed.start(server, workers=2, attempts=2, lease=CALM)
    async with run.load(seconds=0.002):
        await run.handles(100)
        for fields in MALFORMED.values():
            _add_raw(run, server, fields)
        await run.handles(200)
    verdict = await run.verdict()
    assert not verdict.repeats, verdict
    return verdict


def _add_raw(run: ScenarioRun, server: Server, fields: list[object]) -> None:
    partition = run.random.randrange(8)
    entry_id = ask(server, "XADD", run.broker.keys.stream(TOPIC, partition), "*", *fields).decode()
    run.history.poison.add((f"entry {partition}/{entry_id}", 0))


@scenario(
    "21",
    injection="raw entries of 2, 16 and 64 MiB",
    bound="no lease is lost, all other messages are handled",
    servers=ONE,
)
async def giants(testbed: Testbed) -> Verdict:
    """Another client publishes above the size limit; the payload is not JSON and becomes a dead letter."""
    server = await testbed.shared_server()
    run = await testbed.start(server, workers=2, lease=6, attempts=2)
    async with run.load(seconds=0.005):
        await run.handles(100)
        for mebibytes in (2, 16, 64):
            _add_raw(run, server, ["data", b"\0" * (mebibytes << 20)])
            await run.handles(100)
    return await run.verdict(seconds=60)


@scenario("52", injection="half of the messages come from a newer version: unknown fields in a different order",
          bound="they are handled in order, no dead letter", servers=ONE, is_cheap=True)  # fmt: skip
async def two_versions(testbed: Testbed) -> Verdict:
    """A rolling upgrade in which the publishers are upgraded first."""
    server = await testbed.shared_server()
    run = await testbed.start(server, workers=2, lease=CALM)
    async with run.load(seconds=0.002):
        await run.handles(100)
        for n in range(100):
            stream = run.broker.keys.stream(TOPIC, 3)
            order = json.dumps({"key": "v2", "n": n})
            ask(server, "XADD", stream, "*", "v", "2", "key", "v2", "trace", "abc", "data", order, "shape", "new")
            run.history.stored.add(("v2", n))
        await run.handles(100)
    verdict = await run.verdict()
    assert not verdict.findings, verdict
    return verdict
