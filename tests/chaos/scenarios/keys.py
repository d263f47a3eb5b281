"""An operator's hand, or a bug of somebody else's: keys deleted, renamed, trimmed, groups destroyed, under load."""

from __future__ import annotations

import contextlib
import re

import anyio
import redis

from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Innocent, Never, Verdict
from tests.chaos.scenarios.server import all_alive
from tests.chaos.scene import Scene
from tests.chaos.stage import Stage, ask
from tests.chaos.worker import GROUP, TOPIC
from tests.servers import Server

PARTITIONS = range(8)


@scenario("30", injection="XGROUP DESTROY in every partition", bound="made again from the start: repeats, no loss",
          is_cheap=True)  # fmt: skip
async def group_is_destroyed(stage: Stage) -> Verdict:
    """The workers make it again by themselves."""
    return await _destroyed(stage, again=None)


@scenario("A12", injection="XGROUP DESTROY, and XGROUP CREATE at 0 by somebody else at once, in every partition",
          bound="repeats, no loss")  # fmt: skip
async def group_is_made_anew(stage: Stage) -> Verdict:
    """No error tells the workers that what they have in hand is not theirs any more."""
    return await _destroyed(stage, again="0")


async def _destroyed(stage: Stage, again: str | None) -> Verdict:
    server = await stage.server()
    scene = await stage.on(server, workers=2)
    scene.excuse("the group was destroyed")
    scene.story.rewound = "the group was destroyed"
    async with scene.load(seconds=0.005):
        await scene.handles(200)
        for partition in PARTITIONS:
            stream = scene.broker.keys.stream(TOPIC, partition)
            with server.client() as client, client.pipeline(transaction=True) as both:
                both.xgroup_destroy(stream, GROUP)
                if again is not None:
                    both.xgroup_create(stream, GROUP, again)
                both.execute(raise_on_error=False)
        await scene.heals()
        await scene.handles(100)
    all_alive(scene)
    return await scene.verdict()


@scenario("32", injection="XGROUP DELCONSUMER of every living consumer, five times: their pending lists are gone",
          bound="nothing is lost as long as the workers live")  # fmt: skip
async def consumers_are_deleted(stage: Stage) -> Verdict:
    """What is in hand is pending no more: nobody would take it over."""
    server = await stage.server()
    scene = await stage.on(server, workers=2)
    scene.excuse("its consumer was deleted")
    async with scene.load(seconds=0.01, failing=0.1):
        for _ in range(5):
            await scene.handles(100)
            _delete_consumers(server, scene)
        await scene.handles(200)
    return await scene.verdict()


@scenario("32", injection="XGROUP DELCONSUMER of every consumer; when the owners have noticed, all are killed at once",
          bound="what was in hand is pending again within two looks: nothing is lost")  # fmt: skip
async def consumers_are_deleted_and_die(stage: Stage) -> Verdict:
    """The owner of a partition makes pending again what it has in hand, before it is too late."""
    server = await stage.server()
    scene = await stage.on(server)
    scene.excuse("killed")
    await scene.burst(2000, seconds=0.1)
    await scene.handles(100)
    _delete_consumers(server, scene)
    await scene.until(lambda: _pending(server, scene) >= 2000 - len(scene.ledger.commits()), "all is pending again")
    assert "not pending any more" in scene.crew.log(10**8), "nobody has said so"
    await _replace_all(scene)
    await scene.heals()
    return await scene.verdict()


@scenario("32", injection="XGROUP DELCONSUMER of every consumer, and SIGKILL of all before they can notice",
          bound="what they had in hand is lost, and nothing in the server tells of it: the checker does")  # fmt: skip
async def consumers_are_deleted_and_die_at_once(stage: Stage) -> Verdict:
    """What rsmq cannot make good: neither pending nor undelivered, and nobody is left who knew."""
    server = await stage.server()
    scene = await stage.on(server)
    scene.excuse("killed")
    await scene.burst(2000, seconds=0.1)
    await scene.handles(100)
    scene.story.given_up = dict.fromkeys(scene.story.stored, "its consumer was deleted, and died")
    for hand in scene.crew.living:
        hand.pause()
    _delete_consumers(server, scene)
    await _replace_all(scene)
    async with scene.load(seconds=0.002):
        await scene.handles(200)
    verdict = await scene.verdict()
    scene.lost = sum(isinstance(each, Never) for each in verdict.findings)
    assert scene.lost > 0, "nothing was in hand"
    return verdict


async def _replace_all(scene: Scene) -> None:
    for hand in scene.crew.living:
        hand.kill()
    await scene.crew.hire(3)


def _delete_consumers(server: Server, scene: Scene) -> None:
    for partition in PARTITIONS:
        stream = scene.broker.keys.stream(TOPIC, partition)
        for row in _rows(server, "XINFO", "CONSUMERS", stream, GROUP):
            ask(server, "XGROUP", "DELCONSUMER", stream, GROUP, row[b"name"])


def _pending(server: Server, scene: Scene) -> int:
    streams = [scene.broker.keys.stream(TOPIC, partition) for partition in PARTITIONS]
    return sum(int(str(row[b"pending"])) for each in streams for row in _rows(server, "XINFO", "GROUPS", each))


def _rows(server: Server, *question: str) -> list[dict[bytes, object]]:
    with server.client() as client:
        client.response_callbacks.clear()
        rows = client.execute_command(*question)
    return [dict(zip(row[::2], row[1::2], strict=True)) for row in rows]


@scenario("23", injection="XTRIM MAXLEN 5 by another client, under load and backlog", servers=ONE,
          bound="what was pending is a dead letter (lost-body); the workers count what is gone")  # fmt: skip
async def trimmed_by_others(stage: Stage) -> Verdict:
    """Redis says nothing to anybody."""
    server = await stage.server()
    scene = await stage.on(server, workers=2, prefetch=50)
    await scene.burst(3000, seconds=0.05)
    await scene.handles(100)
    for partition in PARTITIONS:
        ask(server, "XTRIM", scene.broker.keys.stream(TOPIC, partition), "MAXLEN", 5)
    scene.story.given_up = dict.fromkeys(scene.story.stored, "trimmed by somebody else")
    async with scene.load(seconds=0.002):
        await scene.handles(200)
    await scene.until_settled()
    gone = len(scene.story.given_up.keys() - scene.ledger.commits())
    await scene.until(lambda: deletions_told(scene) >= gone, f"{gone} are counted")
    verdict = but_for_bodies(await scene.verdict())
    scene.lost = sum(isinstance(each, Never) for each in verdict.findings)
    assert scene.lost > 0, "nothing was trimmed"
    return verdict


def but_for_bodies(verdict: Verdict) -> Verdict:
    """What waited for a retry in a stream that somebody took is a dead letter, and says that its body is gone."""
    verdict.findings = [
        each for each in verdict.findings if not (isinstance(each, Innocent) and each.reason == "lost-body")
    ]
    return verdict


def deletions_told(scene: Scene) -> int:
    """How many entries the workers have said to be deleted by others."""
    return sum(map(int, re.findall(r"(\d+) entries of \S+ were deleted by somebody else", scene.crew.log(10**8))))


@scenario(
    "A13", injection="DEL of every lease, ten times under load", bound="order is kept, nothing lost", is_cheap=True
)
async def leases_are_deleted(stage: Stage) -> Verdict:
    """Every partition seems free: its owner is refused from then on, and somebody takes it under a new epoch."""
    server = await stage.common()
    scene = await stage.on(server, workers=2)
    scene.excuse("its leases were deleted")
    async with scene.load(seconds=0.01):
        for _ in range(10):
            await scene.handles(50)
            ask(server, "DEL", *(scene.broker.keys.lease(TOPIC, partition, GROUP) for partition in PARTITIONS))
        await scene.heals()
        await scene.handles(200)
    return await scene.verdict()


@scenario("A14", injection="DEL of the set of members and of every heartbeat, ten times", bound="order is kept",
          is_cheap=True)  # fmt: skip
async def members_are_deleted(stage: Stage) -> Verdict:
    """Nobody seems to live."""
    server = await stage.common()
    scene = await stage.on(server)
    keys = scene.broker.keys
    scene.excuse("its membership was deleted")
    async with scene.load(seconds=0.01):
        for _ in range(10):
            await scene.handles(50)
            members = ask(server, "SMEMBERS", keys.members(TOPIC, GROUP))
            ask(server, "DEL", keys.members(TOPIC, GROUP), *(keys.alive(TOPIC, GROUP, m.decode()) for m in members))
        await scene.heals()
        await scene.handles(200)
        await scene.until(lambda: ask(server, "SCARD", keys.members(TOPIC, GROUP)) == 3, "all are members again")
    return await scene.verdict()


@scenario("A15", injection="DEL of every retry set while a third of all messages wait for a retry, five times",
          bound="with key order nothing is lost: what waits is pending", servers=ONE)  # fmt: skip
async def retries_are_deleted(stage: Stage) -> Verdict:
    """The owner knows what it has parked."""
    server = await stage.common()
    scene = await stage.on(server, workers=2)
    async with scene.load(seconds=0.005, failing=0.3):
        for _ in range(5):
            await scene.handles(60)
            ask(server, "DEL", *(scene.broker.keys.retry(TOPIC, partition, GROUP) for partition in PARTITIONS))
        await scene.handles(100)
    return await scene.verdict()


@scenario("A16", injection="RENAME of two streams under load: their messages, groups and positions are elsewhere",
          bound="what comes afterwards flows; nobody gives up")  # fmt: skip
async def streams_are_renamed(stage: Stage) -> Verdict:
    """As if they had been deleted, and somebody has them."""
    server = await stage.server()
    scene = await stage.on(server, workers=2)
    scene.excuse("its stream was renamed")
    scene.story.rewound = "a stream was renamed"
    async with scene.load(seconds=0.005):
        await scene.handles(200)
        for partition in (0, 1):
            ask(server, "RENAME", scene.broker.keys.stream(TOPIC, partition), f"elsewhere-{{{partition}}}")
        await scene.heals()
        await scene.handles(300)
    await scene.until_settled()
    before = set(scene.story.stored)
    scene.story.unknown |= before
    scene.story.stored -= before
    await scene.burst(300)
    all_alive(scene)
    return but_for_bodies(await scene.verdict())


@scenario("A17", injection="a string under the key of a stream for two leases, then deleted", servers=ONE,
          bound="the other partitions go on, and so does this one afterwards")  # fmt: skip
async def a_foreign_type(stage: Stage) -> Verdict:
    """WRONGTYPE to every read, settlement and publish."""
    server = await stage.server()
    scene = await stage.on(server, workers=2)
    stream = scene.broker.keys.stream(TOPIC, 0)
    scene.excuse("its stream was replaced")
    scene.story.rewound = "a stream was replaced"
    async with scene.load(seconds=0.005):
        await scene.handles(200)
        ask(server, "SET", stream, "not a stream")
        await scene.heals()
        await anyio.sleep(2 * scene.job.lease)  # the mistake is the fault under test
        ask(server, "DEL", stream)
        await scene.heals()
        await scene.handles(300)
    await scene.until_settled()
    before = set(scene.story.stored)
    scene.story.unknown |= before
    scene.story.stored -= before
    await scene.burst(300)
    all_alive(scene)
    return but_for_bodies(await scene.verdict())


@scenario("A18", injection="the reading connection of a worker is killed (CLIENT KILL ID, out of its lease), "
          "again and again: between a read and its settlement", is_cheap=True)  # fmt: skip
async def the_reader_is_killed(stage: Stage) -> Verdict:
    """What was read is in a pending list; whether it arrived, only the worker knows."""
    server = await stage.common()
    scene = await stage.on(server, workers=2)
    scene.excuse("its reader was killed")
    async with scene.load(seconds=0.01):
        for _ in range(20):
            await scene.handles(20)
            _kill_readers(server, scene)
        await scene.heals()
        await scene.handles(200)
    return await scene.verdict()


def _kill_readers(server: Server, scene: Scene) -> None:
    """Every connection that some lease names as its reader."""
    readers = set()
    for partition in PARTITIONS:
        (reader,) = ask(server, "HMGET", scene.broker.keys.lease(TOPIC, partition, GROUP), "reader")
        readers.add((reader or b"").partition(b" ")[0])
    for reader in readers - {b""}:
        with contextlib.suppress(redis.ResponseError):
            ask(server, "CLIENT", "KILL", "ID", reader)


@scenario("A19", injection="the group is reset to the start five times while retention trims all that is settled",
          bound="nothing that was never handled is trimmed", servers=ONE)  # fmt: skip
async def reset_while_trimming(stage: Stage) -> Verdict:
    """Both change what a partition still holds."""
    server = await stage.common()
    keep_nothing = {"retention_age": "PT0S", "retention_length": "0", "retention_interval": "PT0.05S"}
    scene = await stage.on(server, workers=2, more=keep_nothing)
    scene.excuse("the group was reset")
    scene.story.rewound = "the group was reset"
    async with scene.load(seconds=0.005):
        for _ in range(5):
            await scene.handles(80)
            await scene.broker.reset_group(TOPIC, GROUP)
        await scene.heals()
        await scene.handles(200)
    return await scene.verdict()


@scenario("A20", injection="the topic's description is deleted under load, then the group's", bound="no duplicate",
          servers=ONE)  # fmt: skip
async def descriptions_are_deleted(stage: Stage) -> Verdict:
    """Neither holds a message."""
    server = await stage.common()
    scene = await stage.on(server, workers=2)
    keys = scene.broker.keys
    async with scene.load(seconds=0.005):
        for key in (keys.topic(TOPIC), keys.topics, keys.group(TOPIC, GROUP)):
            await scene.handles(100)
            ask(server, "DEL", key)
        await scene.handles(200)
        await scene.crew.hire()
        await scene.handles(100)
    verdict = await scene.verdict()
    assert not verdict.repeats, verdict
    return verdict
