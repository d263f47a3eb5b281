"""Handlers that are slow, block, hang, raise, crash and take no cancellation; messages that nobody can read."""

from __future__ import annotations

import json

from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Verdict
from tests.chaos.scene import Scene
from tests.chaos.stage import Stage, ask
from tests.chaos.worker import GROUP, TOPIC
from tests.servers import Server


@scenario("9", injection="a handler that needs three leases, awaiting", bound="no duplicate start", servers=ONE)
async def slow_handler(stage: Stage) -> Verdict:
    """A slow handler is not a dead one."""
    scene = await stage.on(await stage.common(), workers=2)
    return await _slow(scene, "work", 3)


@scenario("10", injection="a handler that blocks the event loop for two leases", bound="no duplicate start",
          is_cheap=True)  # fmt: skip
async def blocked_event_loop(stage: Stage) -> Verdict:
    """It keeps its messages: the heartbeat has a thread of its own."""
    return await _slow(await stage.on(await stage.common()), "block", 2)


async def _slow(scene: Scene, do: str, leases: float) -> Verdict:
    async with scene.load(seconds=0.005):
        await scene.handles(100)
        slow = await scene.publish("k0", do=do, seconds=leases * scene.job.lease)
        await scene.until(lambda: slow in scene.ledger.commits(), "the slow handler ends")
        await scene.handles(100)
    verdict = await scene.verdict()
    assert not verdict.findings, verdict
    return verdict


@scenario("11", injection="a handler in C code that holds the interpreter lock for two leases",
          bound="in the same process it counts as paused; in one of its own nothing is repeated",
          variants=({"execution": "inline"}, {"execution": "process"}), servers=ONE)  # fmt: skip
async def the_interpreter_is_held(stage: Stage, execution: str) -> Verdict:
    """No thread runs either, so no heartbeat can help; `execution="process"` does."""
    scene = await stage.on(await stage.common(), workers=2, execution=execution, concurrency=4)
    async with scene.load(seconds=0.005, burst=4):
        await scene.handles(60)
        name = await scene.publish("k0", do="hold the GIL", seconds=2 * scene.job.lease)
        victim = await scene.begins(name)
        if execution == "inline":
            scene.excuse("held the lock", scene.hand_of(victim))
            scene.story.most_repeats = scene.job.concurrency
        await scene.until(lambda: name in scene.ledger.commits(), "the handler ends")
        await scene.handles(60)
    return await scene.verdict()


@scenario("12", injection="a handler that hangs once, and one that always hangs", bound="the second is the dead letter",
          is_cheap=True)  # fmt: skip
async def hung_handler(stage: Stage) -> Verdict:
    """It is ended by its time-out and tried again; one that always hangs becomes a dead letter."""
    scene = await stage.on(await stage.common(), workers=2, timeout=0.5, attempts=3)
    async with scene.load():
        await scene.handles(100)
        await scene.publish("k1", do="hang once")
        await scene.publish_poison("k2", do="hang")
        await scene.handles(200)
    verdict = await scene.verdict()
    assert not verdict.findings, verdict
    assert [reason for _, reason in scene.story.dead] == ["timeout"]
    return verdict


@scenario("13", injection="a third of all messages raise at their first attempt", bound="no dead letter, order kept",
          variants=({"distribution": "hash"}, {"distribution": "shared"}), is_cheap=True)  # fmt: skip
async def handlers_raise(stage: Stage, distribution: str) -> Verdict:
    """Retries under load, with a worker killed in the middle of them."""
    scene = await stage.on(await stage.common(), distribution=distribution)
    async with scene.load(failing=0.3):
        await scene.handles(200)
        victim = scene.busiest()
        victim.kill()
        scene.excuse("killed", victim)
        await scene.handles(300)
    return await scene.verdict()


@scenario("14", injection="fixed messages that always raise", bound="each is a dead letter once, after max attempts",
          is_cheap=True)  # fmt: skip
async def poison_that_raises(stage: Stage) -> Verdict:
    """The dead letters are exactly the poison, and say why."""
    scene = await stage.on(await stage.common(), workers=2, attempts=3)
    async with scene.load(seconds=0.002):
        await scene.handles(50)
        for n in range(5):
            await scene.publish_poison(f"k{n}", do="raise")
        await scene.handles(200)
    verdict = await scene.verdict()
    topic = await scene.broker.topics.find(TOPIC)
    assert topic is not None
    letters = [letter async for letter in scene.broker.dead_letters.iterate(topic, GROUP)]
    assert {(each.attempts, each.error) for each in letters} == {(3, "ValueError: every attempt fails")}
    return verdict


@scenario("15", injection="two of sixty messages end their process", bound="dead letters exactly those two",
          variants=({"do": "exit"}, {"do": "segv"}), is_cheap=True)  # fmt: skip
async def poison_that_kills(stage: Stage, do: str) -> Verdict:
    """Whoever happened to be in the same process is innocent."""
    scene = await stage.on(await stage.common(), workers=2, concurrency=8)
    poison = scene.random.sample(range(60), 2)
    async with scene.crew.supervised():
        for n in range(60):
            if n in poison:
                await scene.publish_poison(f"k{n % 7}", do=do)
            else:
                await scene.publish(f"k{n % 7}", seconds=0.005)
        await scene.until_settled(240)  # ten processes have to start and die, one after the other
    dead = [hand for hand in scene.crew.hands if hand.exit_code not in (None, 0)]
    scene.excuse("crashed", *dead)
    return await scene.verdict()


@scenario("16", injection="SIGTERM while a handler swallows every cancellation", servers=ONE,
          bound="the worker ends within grace and lease; the message runs elsewhere")  # fmt: skip
async def cancellation_is_swallowed(stage: Stage) -> Verdict:
    """`except BaseException: pass` around an await."""
    scene = await stage.on(await stage.common(), workers=2, stop_grace=0.5)
    name = await scene.publish("deaf", do="swallow", seconds=8)
    leaver = scene.hand_of(await scene.begins(name))
    scene.excuse("deaf", leaver)
    leaver.terminate()
    assert await leaver.ended(25) == 0, scene.crew.log()
    async with scene.load():
        await scene.handles(50)
    return await scene.verdict()


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


@scenario("18, 19, 20", injection="raw entries: fields missing, doubled, too many, no UTF-8, depth and digit bombs",
          bound="each is a dead letter, its neighbours are handled", is_cheap=True)  # fmt: skip
async def malformed(stage: Stage) -> Verdict:
    """What nobody can read harms nobody."""
    server = await stage.common()
    scene = await stage.on(server, workers=2, attempts=2)
    async with scene.load(seconds=0.002):
        await scene.handles(100)
        for fields in MALFORMED.values():
            _add_raw(scene, server, fields)
        await scene.handles(200)
    verdict = await scene.verdict()
    assert not verdict.repeats, verdict
    return verdict


def _add_raw(scene: Scene, server: Server, fields: list[object]) -> None:
    partition = scene.random.randrange(8)
    entry_id = ask(server, "XADD", scene.broker.keys.stream(TOPIC, partition), "*", *fields).decode()
    scene.story.poison.add((f"entry {partition}/{entry_id}", 0))


@scenario(
    "21", injection="raw entries of 2, 16 and 64 MiB", bound="no lease is lost, nobody else is harmed", servers=ONE
)
async def giants(stage: Stage) -> Verdict:
    """Somebody publishes past the limit with another client; it is not JSON, and becomes a dead letter."""
    server = await stage.common()
    scene = await stage.on(server, workers=2, lease=6, attempts=2)
    async with scene.load(seconds=0.005):
        await scene.handles(100)
        for mebibytes in (2, 16, 64):
            _add_raw(scene, server, ["data", b"\0" * (mebibytes << 20)])
            await scene.handles(100)
    return await scene.verdict(seconds=60)


@scenario("52", injection="half of the messages come from a newer version: unknown fields in another order",
          bound="they are handled, in order, and nothing is a dead letter", servers=ONE, is_cheap=True)  # fmt: skip
async def two_versions(stage: Stage) -> Verdict:
    """A rolling upgrade in which publishers are ahead of workers."""
    server = await stage.common()
    scene = await stage.on(server, workers=2)
    async with scene.load(seconds=0.002):
        await scene.handles(100)
        for n in range(100):
            stream = scene.broker.keys.stream(TOPIC, 3)
            order = json.dumps({"key": "v2", "n": n})
            ask(server, "XADD", stream, "*", "v", "2", "key", "v2", "trace", "abc", "data", order, "shape", "new")
            scene.story.stored.add(("v2", n))
        await scene.handles(100)
    verdict = await scene.verdict()
    assert not verdict.findings, verdict
    return verdict
