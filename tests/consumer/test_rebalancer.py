"""The rebalancer: a worker that stops while a lease changes its owner leaves none behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import anyio
import pytest

from rsmq import Broker, BrokerUnavailable
from rsmq.handler.options import Distribution
from rsmq.heartbeat import lease as leases
from rsmq.heartbeat.assignment import assign
from rsmq.heartbeat.heartbeat import Heartbeat
from rsmq.model.settings import Settings
from rsmq.redis.scripts import RELEASE_LEASE, TAKE_LEASE, Script
from rsmq.worker import worker
from tests.patience import until

AIR = 0.1
"""Seconds that a reply is on its way: longer than the stop needs to reach the rebalancer."""


class Slow:
    """A script that calls `now` while its n-th reply is on its way."""

    def __init__(self, script: Script, number: int, now: Callable[[], object]) -> None:
        self._script, self._left, self._now = script, number, now

    async def __call__(self, *args: Any) -> Any:
        self._left -= 1
        if self._left:
            return await self._script(*args)
        reply = await self._script(*args)
        self._now()
        await asyncio.sleep(AIR)
        return reply


@pytest.fixture
def make(settings: Settings) -> Callable[[], Broker]:
    """Members of one group, whose leases would outlive the test by far."""
    patient = replace(settings, lease_ttl=timedelta(hours=1), preflight="warn")

    def member() -> Broker:
        broker = Broker(patient)

        @broker.handler("t", group="g")
        async def handle(order: dict[str, int]) -> None: ...

        return broker

    return member


def held(broker: Broker) -> int:
    """How many partitions a member has, also while it begins or ends."""
    return sum(len(each.lanes) for each in broker.worker.consumers) if broker.worker else 0


async def owners(broker: Broker) -> set[bytes]:
    """Who holds a lease, as the server has it."""
    keys = [broker.keys.lease("t", partition, "g") for partition in range(8)]
    return {await broker.client.execute_command("HGET", key, "owner") or b"" for key in keys}


@pytest.mark.parametrize("number", [1, 5, 8])
@pytest.mark.parametrize("way", ["stop", "cancel"])
async def test_worker_that_ends_while_it_takes_a_lease_gives_it_back(
    make: Callable[[], Broker], monkeypatch: pytest.MonkeyPatch, number: int, way: str
) -> None:
    """The server has granted it and the reply is on its way: another member can have it at once."""
    broker = make()
    async with broker:
        with anyio.CancelScope() as scope:
            end = broker.stop if way == "stop" else scope.cancel
            monkeypatch.setattr(leases, "TAKE_LEASE", Slow(TAKE_LEASE, number, end))
            await broker.run()
        assert await owners(broker) == {b""}
    async with make().running() as other:
        await until(lambda: held(other) == 8, "another worker has all partitions")


async def test_worker_that_is_cancelled_while_it_releases_a_lease_releases_it(
    make: Callable[[], Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition is being handed over to a member that has joined."""
    first, second, scope = make(), make(), anyio.CancelScope()

    async def run() -> None:
        with scope:
            await first.run()

    async def release(*args: Any) -> Any:
        if not scope.cancel_called:
            scope.cancel()
            await asyncio.sleep(AIR)  # the server is slow
        return await RELEASE_LEASE(*args)

    async with first, anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await until(lambda: held(first) == 8, "the first has all")
        monkeypatch.setattr(leases, "RELEASE_LEASE", release)
        async with second.running():
            await until(lambda: held(second) == 8, "the second has all")


async def test_lease_that_is_granted_during_an_absence_is_asked_for_again(
    make: Callable[[], Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other members could take it away at once, and this one would still believe in it."""
    absences: list[bool] = []
    monkeypatch.setattr(Heartbeat, "absences", property(lambda _: len(absences)))
    monkeypatch.setattr(leases, "TAKE_LEASE", Slow(TAKE_LEASE, 3, lambda: absences.append(True)))
    broker = make()
    async with broker:
        for partition in range(8):  # ahead of the clock, so that each grant adds 1
            await broker.client.execute_command("HSET", broker.keys.lease("t", partition, "g"), "epoch", 10**15)
    async with broker.running():
        await until(lambda: held(broker) == 8, "it has all partitions")
        keys = [broker.keys.lease("t", partition, "g") for partition in range(8)]
        epochs = [await broker.client.execute_command("HGET", key, "epoch") for key in keys]
        assert sorted(int(epoch) - 10**15 for epoch in epochs) == [1] * 7 + [2]


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_member_that_is_absent_reads_no_partition(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, distribution: Distribution
) -> None:
    """Its subscription is interrupted for longer than the grace, and it could be connected otherwise."""
    looks: list[bool] = []
    states = iter([True] * 10)

    def is_absent(_: Heartbeat) -> bool:
        looks.append(next(states, False))
        return looks[-1]

    monkeypatch.setattr(Heartbeat, "is_absent", property(is_absent))
    broker = Broker(replace(settings, preflight="warn"))

    @broker.handler("t", group="g", distribution=distribution)
    async def handle(order: dict[str, int]) -> None: ...

    async with broker.running():
        await until(lambda: len(looks) >= 5, "the member has looked")
        assert looks[-1] is False or not held(broker)
        await until(lambda: held(broker) == 8, "it has all partitions")


async def test_lease_whose_grant_was_lost_is_handed_over(
    make: Callable[[], Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply is lost while another member joins that should have the partition: it need not wait for the lease."""
    monkeypatch.setattr(worker, "new_member_id", iter(("first", "second")).__next__)
    first, second, is_granted = make(), make(), anyio.Event()

    async def take(client: Any, names: Any, args: Any) -> Any:
        reply = await TAKE_LEASE(client, names, args)
        if args[0] == "first" and "{t.6}" in names[0] and not is_granted.is_set():
            is_granted.set()
            await until(lambda: "second" in view.live, "the other is seen")
            raise BrokerUnavailable("the reply is lost")
        return reply

    monkeypatch.setattr(leases, "TAKE_LEASE", take)
    async with first.running():
        view = first.worker.consumers[0].membership
        await is_granted.wait()
        async with second.running():
            assert assign(8, ["first", "second"], "t/g")[6] == "second"
            await until(lambda: held(first) == held(second) == 4, "each has half")


async def test_partition_that_cannot_be_taken_does_not_block_the_others(make: Callable[[], Broker]) -> None:
    """Another client has written under the key of its lease: until that is repaired the others are served."""
    broker = make()
    async with broker:
        await broker.client.execute_command("SET", broker.keys.lease("t", 0, "g"), "foreign")
        async with broker.running():
            await until(lambda: held(broker) == 7, "it has the others")
            await broker.client.execute_command("DEL", broker.keys.lease("t", 0, "g"))
            await until(lambda: held(broker) == 8, "it has all")
