"""Failovers that lose writes: the new master has another history, another clock, and may use ids again."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import anyio
import redis

from rsmq.testing.proxy import Proxy
from tests.chaos.catalogue import scenario
from tests.chaos.checker import Never, Verdict
from tests.chaos.publisher import PublisherJob
from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.scenarios.keys import PARTITIONS
from tests.chaos.scenarios.server import after_all_is_lost, all_alive
from tests.chaos.system_faults import FaultyServer
from tests.chaos.testbed import Testbed, ask
from tests.chaos.worker import GROUP, TOPIC

HOUR = 3600
CLOCKS = tuple({"distribution": how, "clock": off} for how in ("hash", "shared") for off in (0, HOUR, -HOUR))


class Pair:
    """A master and its replica. Clients connect through `front`, the replica through `link`: both can be moved."""

    def __init__(self, master: FaultyServer, replica: FaultyServer, front: Proxy, link: Proxy) -> None:
        self.master, self.replica, self.front, self.link = master, replica, front, link

    @classmethod
    async def begin(cls, testbed: Testbed) -> Pair:
        """Start both, in sync."""
        options = {"tcp": True}
        master = await testbed.faulty_server(**options)
        replica = await testbed.faulty_server("--repl-diskless-sync-delay", "0", **options)
        pair = cls(master, replica, await testbed.proxy(master), await testbed.proxy(master))
        await pair.follow(replica, pair.link)
        return pair

    async def follow(self, replica: FaultyServer, link: Proxy) -> None:
        """Let a server replicate what is behind a proxy, and wait until it is in sync."""
        ask(replica, "REPLICAOF", "127.0.0.1", link.port)
        with anyio.fail_after(30):
            while True:
                with suppress(redis.RedisError), replica.client() as client:
                    state = client.info("replication")
                    if state["master_link_status"] == "up" and not state["master_sync_in_progress"]:
                        return
                await anyio.sleep(0.02)

    async def fail_over(self, seconds: float) -> None:
        """Cut the replica off, let the master confirm more for so long, then lose it and promote the replica."""
        await self._catch_up()  # what was confirmed before this call is replicated, however busy the machine is
        self.link.cut()
        await anyio.sleep(seconds)  # what is confirmed now will be lost
        self.front.cut()
        self.front.reset()
        self.master.kill()
        self.link.reset()
        ask(self.replica, "REPLICAOF", "NO", "ONE")
        self.front.move(self.replica.port)
        self.front.mend()
        self.master, self.replica = self.replica, self.master

    async def _catch_up(self) -> None:
        """Wait until the replica has all that the master has now."""
        with self.master.client() as client:
            aim = client.info("replication")["master_repl_offset"]
        with anyio.fail_after(30), self.replica.client() as client:
            while client.info("replication")["slave_repl_offset"] < aim:
                await anyio.sleep(0.01)

    async def return_to_the_old_one(self) -> None:
        """The lost master starts with all that it had, and the clients come back to it: no replication in between."""
        self.front.cut()
        self.front.reset()
        self.master.kill()
        await anyio.to_thread.run_sync(self.replica.start)
        self.front.move(self.replica.port)
        self.front.mend()
        self.master, self.replica = self.replica, self.master


async def _begin(testbed: Testbed, distribution: str) -> tuple[Pair, ScenarioRun]:
    pair = await Pair.begin(testbed)
    run = await testbed.begin(ScenarioRun, pair.front.url, workers=3, distribution=distribution)
    await run.processes.start_publisher(
        PublisherJob(run.job, many=20, pause=0.04, keys=40, seed=testbed.seed, handler_seconds=0.03)
    )
    await run.handles(300)
    return pair, run


def _loses(run: ScenarioRun, why: str) -> None:
    run.excuse(why)
    run.history.rewound = why


@scenario("A27", injection="the master is lost with its last writes; the clock of the replica that takes over is "
          "off by so many seconds",
          bound="what was confirmed after the takeover is handled; only unreplicated messages are lost",
          variants=CLOCKS)  # fmt: skip
async def failover_with_another_clock(testbed: Testbed, distribution: str, clock: int) -> Verdict:
    """Leases, heartbeats and retries of the old master count by a clock that the new one does not have."""
    pair, run = await _begin(testbed, distribution)
    pair.replica.faults.step_clock(clock)
    _loses(run, "the master was lost")
    since = run.now()
    await pair.fail_over(0.5)
    run.forgive(since - 0.5, run.now())
    await run.recovers()
    await run.handles(500)
    all_alive(run)
    return await run.verdict()


@scenario("A28", injection="the master is lost with its last writes, its replica takes over; then the replica is lost "
          "and the old master returns with its own history",
          bound="what was confirmed after the return is handled; only what one of them lacks is lost",
          variants=({"distribution": "hash"}, {"distribution": "shared"}))  # fmt: skip
async def the_old_master_returns(testbed: Testbed, distribution: str) -> Verdict:
    """Two histories of one queue, as after an operator's mistake: epochs, ids and settlements go back."""
    pair, run = await _begin(testbed, distribution)
    _loses(run, "the history changed")
    since = run.now()
    await pair.fail_over(0.5)
    await run.recovers()
    await run.handles(300)
    await pair.return_to_the_old_one()
    run.forgive(since - 0.5, run.now())
    await run.recovers()
    await run.handles(500)
    all_alive(run)
    return await run.verdict()


@scenario("A29", injection="the clock steps an hour forward and back, so ids only count up; then the master is lost "
          "with its last writes: the new master gives their ids to other messages",
          bound="what was confirmed after the takeover is handled",
          variants=({"distribution": "hash"}, {"distribution": "shared"}))  # fmt: skip
async def ids_are_used_again(testbed: Testbed, distribution: str) -> Verdict:
    """A worker may have a message in flight whose id is another message's now."""
    pair, run = await _begin(testbed, distribution)
    _loses(run, "the master was lost")
    for off in (HOUR, 0):
        pair.master.faults.step_clock(off)
        await run.recovers()
        await run.handles(200)
    twice = 0
    for _ in range(4):
        since = run.now()
        await pair.fail_over(0.5)
        run.forgive(since - 0.5, run.now())
        await run.recovers()
        await anyio.sleep(run.random.random() / 2)  # while the last messages of the lost master are still in flight
        run.busiest().kill()
        await run.processes.start_workers()
        run.excuse("the master was lost")
        await run.handles(300)
        await anyio.to_thread.run_sync(pair.replica.start)
        twice += sum(map(_ids_of_two, _streams(run, pair.master), _streams(run, pair.replica)))
        pair.link.move(pair.master.port)
        pair.link.mend()
        await pair.follow(pair.replica, pair.link)
    assert twice > 0, "no id was used for two messages: the test shows nothing"
    print(f"{twice} ids of two messages")
    return await run.verdict()


def _streams(run: ScenarioRun, server: FaultyServer) -> list[dict[bytes, object]]:
    """The entries of each partition."""
    return [dict(ask(server, "XRANGE", run.broker.keys.stream(TOPIC, n), "-", "+")) for n in PARTITIONS]


def _ids_of_two(one: dict[bytes, object], other: dict[bytes, object]) -> int:
    return sum(one[each] != other[each] for each in one.keys() & other.keys())


@scenario("A43", injection="with room for 40 messages in memory, while 1500 of five keys wait as ids (100 000 in the "
          "long form): FLUSHALL; or the group is reset to its beginning; or the master is lost with its last writes; "
          "or SIGKILL of the busiest of two workers, whose messages have one attempt; or the topic is full and trims, "
          "and the busiest worker is killed",
          bound="what is published afterwards is handled, in order; nothing that waited as an id is a dead letter",
          variants=(
              {"how": "flushall"}, {"how": "group reset"}, {"how": "failover"}, {"how": "one attempt"},
              {"how": "full topic"},
          ))  # fmt: skip
async def ids_waiting_that_the_server_forgets(testbed: Testbed, how: str) -> Verdict:
    """An id without its message is worth nothing when the server gives it to another one, or does not know it."""
    pair = await Pair.begin(testbed) if how == "failover" else None
    server = await testbed.server() if pair is None else None
    given = {"workers": 0, "lease": 30 if how == "one attempt" else 2, "prefetch": 40, "concurrency": 8}
    given["attempts"] = 1 if how == "one attempt" else 5
    url = pair.front.url if pair is not None else server.url  # type: ignore[union-attr]
    run = await testbed.begin(ScenarioRun, url, **given)
    if how == "full topic":
        await run.broker.topics.ensure(TOPIC)
        await run.broker.topics.change(TOPIC, max_length=100_000, on_full="trim")
    await run.processes.start_workers(2)
    slow = 0.005 if how == "full topic" else 0.0002 if run.seconds else 0.002
    await run.burst(100_000 if run.seconds else 1500, keys=5, seconds=slow, failing=0)
    await run.until(lambda: len(run.ledger.commits()) >= 100, "100 messages are handled")  # perhaps during the burst
    if how == "one attempt":
        return await _with_one_attempt(run)
    if how == "flushall":
        ask(server, "FLUSHALL")  # type: ignore[arg-type]
        return await after_all_is_lost(run)
    if how == "full topic":
        return await _trims(run)
    _loses(run, how)
    if pair is not None:
        kept = set(run.history.stored)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: run.burst(300, keys=5, failing=0))
            await pair.fail_over(0.3)
        run.history.unknown |= run.history.stored - kept  # what was confirmed meanwhile may be lost
        run.history.stored &= kept
    else:
        await run.broker.reset_group(TOPIC, GROUP, "earliest")
    await run.burst(200, keys=5, failing=0)
    await run.recovers()
    all_alive(run)
    return await run.verdict(seconds=300 if run.seconds else 60)


MOST_OF_A_FULL_TOPIC: Final = 100
"""Entries of a partition. The server removes whole blocks of a hundred."""


async def _fill(run: ScenarioRun) -> None:
    """Publish more than there is room for: what was published before, and part of this, may be trimmed."""
    await run.burst(2500, keys=5, seconds=0.005, failing=0)
    run.history.given_up |= dict.fromkeys(run.history.stored, "the topic was full")


async def _trims(run: ScenarioRun) -> Verdict:
    """Ids whose messages the topic removes are counted, and are no dead letters, also after their owner was killed."""
    await run.broker.topics.change(TOPIC, max_length=MOST_OF_A_FULL_TOPIC)
    await _fill(run)
    await run.until(lambda: "before their turn came" in run.processes.log(10**8), "what was trimmed is counted")
    victim = run.busiest()
    victim.kill()
    run.excuse("killed", victim)
    await _fill(run)
    await run.until_settled()
    await run.broker.topics.change(TOPIC, max_length=0)
    await run.burst(200, keys=5, failing=0)
    verdict = await run.verdict(seconds=300 if run.seconds else 60)
    run.lost = sum(isinstance(each, Never) for each in verdict.findings)
    assert run.lost > 0, "nothing was trimmed"
    return verdict


async def _with_one_attempt(run: ScenarioRun) -> Verdict:
    """Only what ran when its worker was killed may become a dead letter."""
    victim = run.busiest()
    victim.kill()
    await victim.ended()
    run.excuse("killed", victim)
    events = [event for event in run.ledger.events() if event.pid == victim.pid]
    ran = {(e.key, e.n) for e in events if e.what == "start"} - {(e.key, e.n) for e in events if e.what == "commit"}
    await run.until_settled(300 if run.seconds else 60)
    run.history.poison |= {name for name, _ in await run.dead() if name in ran}
    return await run.verdict()
