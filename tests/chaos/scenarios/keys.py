"""Keys that an operator or another program deletes, renames, trims or replaces, and groups destroyed, under load."""

from __future__ import annotations

import contextlib
import re

import anyio
import redis

from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Innocent, Never, Verdict
from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.scenarios.server import all_alive
from tests.chaos.testbed import Testbed, ask
from tests.chaos.worker import GROUP, TOPIC
from tests.servers import Server

PARTITIONS = range(8)


@scenario("30", injection="XGROUP DESTROY in every partition", bound="the group is created again at the start: no loss",
          is_cheap=True)  # fmt: skip
async def group_is_destroyed(testbed: Testbed) -> Verdict:
    """The workers create the group again."""
    return await _destroyed(testbed, again=None)


@scenario("A12", injection="XGROUP DESTROY and at once XGROUP CREATE at 0 by another client, in every partition",
          bound="repeats, no loss")  # fmt: skip
async def group_is_made_anew(testbed: Testbed) -> Verdict:
    """The workers get no error: their messages in flight are no longer pending for them."""
    return await _destroyed(testbed, again="0")


async def _destroyed(testbed: Testbed, again: str | None) -> Verdict:
    server = await testbed.server()
    run = await testbed.start(server, workers=2)
    run.excuse("the group was destroyed")
    run.history.rewound = "the group was destroyed"
    async with run.load(seconds=0.005):
        await run.handles(200)
        for partition in PARTITIONS:
            stream = run.broker.keys.stream(TOPIC, partition)
            with server.client() as client, client.pipeline(transaction=True) as both:
                both.xgroup_destroy(stream, GROUP)
                if again is not None:
                    both.xgroup_create(stream, GROUP, again)
                both.execute(raise_on_error=False)
        await run.recovers()
        await run.handles(100)
    all_alive(run)
    return await run.verdict()


@scenario("32", injection="XGROUP DELCONSUMER of every running consumer, five times: their pending lists are deleted",
          bound="nothing is lost as long as the workers run")  # fmt: skip
async def consumers_are_deleted(testbed: Testbed) -> Verdict:
    """Messages in flight are no longer pending, so no other worker could take them over."""
    server = await testbed.server()
    run = await testbed.start(server, workers=2)
    run.excuse("its consumer was deleted")
    async with run.load(seconds=0.01, failing=0.1):
        for _ in range(5):
            await run.handles(100)
            _delete_consumers(server, run)
        await run.handles(200)
    return await run.verdict()


@scenario("32", injection="XGROUP DELCONSUMER of every consumer; all are killed after the owners have detected it",
          bound="messages in flight are pending again after two checks: nothing is lost")  # fmt: skip
async def consumers_are_deleted_and_die(testbed: Testbed) -> Verdict:
    """The owner of a partition makes its messages in flight pending again."""
    server = await testbed.server()
    run = await testbed.start(server)
    run.excuse("killed")
    await run.burst(2000, seconds=0.1)
    await run.handles(100)
    _delete_consumers(server, run)
    await run.until(lambda: _pending(server, run) >= 2000 - len(run.ledger.commits()), "all is pending again")
    assert "no longer pending" in run.processes.log(10**8), "no worker has logged it"
    await _replace_all(run)
    await run.recovers()
    return await run.verdict()


@scenario("32", injection="XGROUP DELCONSUMER of every consumer, and SIGKILL of all before they can detect it",
          bound="messages in flight are lost without a trace in the server: the checker finds them")  # fmt: skip
async def consumers_are_deleted_and_die_at_once(testbed: Testbed) -> Verdict:
    """rsmq cannot repair this: the messages are neither pending nor undelivered, and no process knows of them."""
    server = await testbed.server()
    run = await testbed.start(server)
    run.excuse("killed")
    await run.burst(2000, seconds=0.1)
    await run.handles(100)
    run.history.given_up = dict.fromkeys(run.history.stored, "its consumer was deleted, and died")
    for worker in run.processes.living:
        worker.pause()
    _delete_consumers(server, run)
    await _replace_all(run)
    async with run.load(seconds=0.002):
        await run.handles(200)
    verdict = await run.verdict()
    run.lost = sum(isinstance(each, Never) for each in verdict.findings)
    assert run.lost > 0, "nothing was in flight"
    return verdict


async def _replace_all(run: ScenarioRun) -> None:
    for worker in run.processes.living:
        worker.kill()
    await run.processes.start_workers(3)


def _delete_consumers(server: Server, run: ScenarioRun) -> None:
    for partition in PARTITIONS:
        stream = run.broker.keys.stream(TOPIC, partition)
        for row in _rows(server, "XINFO", "CONSUMERS", stream, GROUP):
            ask(server, "XGROUP", "DELCONSUMER", stream, GROUP, row[b"name"])


def _pending(server: Server, run: ScenarioRun) -> int:
    streams = [run.broker.keys.stream(TOPIC, partition) for partition in PARTITIONS]
    return sum(int(str(row[b"pending"])) for each in streams for row in _rows(server, "XINFO", "GROUPS", each))


def _rows(server: Server, *question: str) -> list[dict[bytes, object]]:
    with server.client() as client:
        client.response_callbacks.clear()
        rows = client.execute_command(*question)
    return [dict(zip(row[::2], row[1::2], strict=True)) for row in rows]


@scenario("23", injection="XTRIM MAXLEN 5 by another client, under load and backlog", servers=ONE,
          bound="pending messages become dead letters (lost-body); the workers count deleted entries")  # fmt: skip
async def trimmed_by_others(testbed: Testbed) -> Verdict:
    """Redis does not notify the workers."""
    server = await testbed.server()
    run = await testbed.start(server, workers=2, prefetch=50)
    await run.burst(3000, seconds=0.05)
    await run.handles(100)
    for partition in PARTITIONS:
        ask(server, "XTRIM", run.broker.keys.stream(TOPIC, partition), "MAXLEN", 5)
    run.history.given_up = dict.fromkeys(run.history.stored, "trimmed by another client")
    async with run.load(seconds=0.002):
        await run.handles(200)
    await run.until_settled()
    gone = len(run.history.given_up.keys() - run.ledger.commits())
    await run.until(lambda: deletions_told(run) >= gone, f"{gone} are counted")
    verdict = but_for_bodies(await run.verdict())
    run.lost = sum(isinstance(each, Never) for each in verdict.findings)
    assert run.lost > 0, "nothing was trimmed"
    return verdict


def but_for_bodies(verdict: Verdict) -> Verdict:
    """Without the dead letters of messages that waited for a retry in a stream that was removed (lost-body)."""
    verdict.findings = [
        each for each in verdict.findings if not (isinstance(each, Innocent) and each.reason == "lost-body")
    ]
    return verdict


def deletions_told(run: ScenarioRun) -> int:
    """How many entries the workers have reported as deleted by another client."""
    return sum(map(int, re.findall(r"(\d+) entr(?:y|ies) of \S+ deleted by another client", run.processes.log(10**8))))


@scenario(
    "A13", injection="DEL of every lease, ten times under load", bound="order is kept, nothing lost", is_cheap=True
)
async def leases_are_deleted(testbed: Testbed) -> Verdict:
    """Every partition looks free: a worker takes it under a new epoch, and the old owner is refused."""
    server = await testbed.shared_server()
    run = await testbed.start(server, workers=2)
    run.excuse("its leases were deleted")
    async with run.load(seconds=0.01):
        for _ in range(10):
            await run.handles(50)
            ask(server, "DEL", *(run.broker.keys.lease(TOPIC, partition, GROUP) for partition in PARTITIONS))
        await run.recovers()
        await run.handles(200)
    return await run.verdict()


@scenario("A14", injection="DEL of the set of members and of every heartbeat, ten times", bound="order is kept",
          is_cheap=True)  # fmt: skip
async def members_are_deleted(testbed: Testbed) -> Verdict:
    """All members look dead."""
    server = await testbed.shared_server()
    run = await testbed.start(server)
    keys = run.broker.keys
    run.excuse("its membership was deleted")
    async with run.load(seconds=0.01):
        for _ in range(10):
            await run.handles(50)
            members = ask(server, "SMEMBERS", keys.members(TOPIC, GROUP))
            ask(server, "DEL", keys.members(TOPIC, GROUP), *(keys.alive(TOPIC, GROUP, m.decode()) for m in members))
        await run.recovers()
        await run.handles(200)
        await run.until(lambda: ask(server, "SCARD", keys.members(TOPIC, GROUP)) == 3, "all are members again")
    return await run.verdict()


@scenario("A15", injection="DEL of every retry set while a third of all messages wait for a retry, five times",
          bound="with key order nothing is lost: blocked messages are pending", servers=ONE)  # fmt: skip
async def retries_are_deleted(testbed: Testbed) -> Verdict:
    """The owner knows which messages it has parked."""
    server = await testbed.shared_server()
    run = await testbed.start(server, workers=2)
    async with run.load(seconds=0.005, failing=0.3):
        for _ in range(5):
            await run.handles(60)
            ask(server, "DEL", *(run.broker.keys.retry(TOPIC, partition, GROUP) for partition in PARTITIONS))
        await run.handles(100)
    return await run.verdict()


@scenario("A16", injection="RENAME of two streams under load: their messages and groups are under another name",
          bound="messages published afterwards are handled; no worker ends")  # fmt: skip
async def streams_are_renamed(testbed: Testbed) -> Verdict:
    """For the workers the streams are deleted."""
    server = await testbed.server()
    run = await testbed.start(server, workers=2)
    run.excuse("its stream was renamed")
    run.history.rewound = "a stream was renamed"
    async with run.load(seconds=0.005):
        await run.handles(200)
        for partition in (0, 1):
            ask(server, "RENAME", run.broker.keys.stream(TOPIC, partition), f"elsewhere-{{{partition}}}")
        await run.recovers()
        await run.handles(300)
    await run.until_settled()
    before = set(run.history.stored)
    run.history.unknown |= before
    run.history.stored -= before
    await run.burst(300)
    all_alive(run)
    return but_for_bodies(await run.verdict())


@scenario("A17", injection="a stream is replaced by a string for two leases, then the key is deleted", servers=ONE,
          bound="the other partitions continue, and so does this one afterwards")  # fmt: skip
async def a_foreign_type(testbed: Testbed) -> Verdict:
    """The server answers WRONGTYPE to every read, settlement and publish."""
    server = await testbed.server()
    run = await testbed.start(server, workers=2)
    stream = run.broker.keys.stream(TOPIC, 0)
    run.excuse("its stream was replaced")
    run.history.rewound = "a stream was replaced"
    async with run.load(seconds=0.005):
        await run.handles(200)
        ask(server, "SET", stream, "not a stream")
        await run.recovers()
        await anyio.sleep(2 * run.job.lease)  # the mistake is the fault under test
        ask(server, "DEL", stream)
        await run.recovers()
        await run.handles(300)
    await run.until_settled()
    before = set(run.history.stored)
    run.history.unknown |= before
    run.history.stored -= before
    await run.burst(300)
    all_alive(run)
    return but_for_bodies(await run.verdict())


@scenario("A18", injection="the reading connection of a worker is killed (CLIENT KILL ID, from its lease), "
          "twenty times: between a read and its settlement", is_cheap=True)  # fmt: skip
async def the_reader_is_killed(testbed: Testbed) -> Verdict:
    """The messages are pending; only the worker knows whether they arrived."""
    server = await testbed.shared_server()
    run = await testbed.start(server, workers=2)
    run.excuse("its reader was killed")
    async with run.load(seconds=0.01):
        for _ in range(20):
            await run.handles(20)
            _kill_readers(server, run)
        await run.recovers()
        await run.handles(200)
    return await run.verdict()


def _kill_readers(server: Server, run: ScenarioRun) -> None:
    """Kill every connection that a lease names as its reader."""
    readers = set()
    for partition in PARTITIONS:
        (reader,) = ask(server, "HMGET", run.broker.keys.lease(TOPIC, partition, GROUP), "reader")
        readers.add((reader or b"").partition(b" ")[0])
    for reader in readers - {b""}:
        with contextlib.suppress(redis.ResponseError):
            ask(server, "CLIENT", "KILL", "ID", reader)


@scenario("A19", injection="the group is reset to the start five times while retention trims everything settled",
          bound="no message is trimmed before it was handled", servers=ONE)  # fmt: skip
async def reset_while_trimming(testbed: Testbed) -> Verdict:
    """Reset and retention race for the same partitions."""
    server = await testbed.shared_server()
    keep_nothing = {"retention_age": "PT0S", "retention_length": "0", "retention_interval": "PT0.05S"}
    run = await testbed.start(server, workers=2, more=keep_nothing)
    run.excuse("the group was reset")
    run.history.rewound = "the group was reset"
    async with run.load(seconds=0.005):
        for _ in range(5):
            await run.handles(80)
            await run.broker.reset_group(TOPIC, GROUP)
        await run.recovers()
        await run.handles(200)
    return await run.verdict()


@scenario("A20", injection="the topic's description is deleted under load, then the group's", bound="no duplicate",
          servers=ONE)  # fmt: skip
async def descriptions_are_deleted(testbed: Testbed) -> Verdict:
    """These keys hold no messages."""
    server = await testbed.shared_server()
    run = await testbed.start(server, workers=2)
    keys = run.broker.keys
    async with run.load(seconds=0.005):
        for key in (keys.topic(TOPIC), keys.topics, keys.group(TOPIC, GROUP)):
            await run.handles(100)
            ask(server, "DEL", key)
        await run.handles(200)
        await run.processes.start_workers()
        await run.handles(100)
    verdict = await run.verdict()
    assert not verdict.repeats, verdict
    return verdict
