"""Workers killed, slots moved and masters lost under load: the verdict is that of the chaos tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from rsmq import BrokerError
from rsmq.errors import BrokerUnavailable
from tests.chaos.checker import Name
from tests.chaos.scene import Scene
from tests.chaos.worker import TOPIC
from tests.cluster.cluster import Cluster

pytestmark = pytest.mark.chaos


class Replicated(Scene):
    """Publishes to a replica, too, so that what is confirmed outlives a master."""

    async def publish(self, key: str, **order: Any) -> Name:
        """Anything but a plain yes or a plain no is of unknown outcome."""
        n = self._next.get(key, 0)
        self._next[key] = n + 1
        try:
            await self.broker.publish(TOPIC, {"key": key, "n": n, **order}, key=key, wait_replicas=1)
            self.story.stored.add((key, n))
        except BrokerUnavailable:
            pass
        except BrokerError:  # PublishUnknown, or stored on too few
            self.story.unknown.add((key, n))
        return key, n


@pytest.fixture
def scene_on(tmp_path: Path, cluster: Cluster) -> Callable[..., Scene]:
    """Makes the scene of a test on the cluster."""
    return lambda kind=Scene, **job: kind(tmp_path, cluster.url, 1, **job)


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_a_killed_worker(scene_on: Callable[..., Scene], distribution: str) -> None:
    """Its messages run elsewhere long before its lease of 30 s is over; nothing is lost or reordered."""
    async with scene_on(lease=30, distribution=distribution) as scene:
        await scene.crew.hire(2)
        async with scene.load(seconds=0.01):
            await scene.handles(200)
            victim = scene.busiest()
            victim.kill()
            killed = time.monotonic()
            scene.excuse("killed", victim)
            await scene.handles(400)
        verdict = await scene.verdict(seconds=20)
        assert not verdict.faults, verdict
        assert scene.recovery(victim, killed) < 20


@pytest.mark.parametrize(
    ("distribution", "how"), [("hash", "migrate"), ("shared", "migrate"), ("hash", "migrate_at_once")]
)
async def test_slots_are_moved(scene_on: Callable[..., Scene], cluster: Cluster, distribution: str, how: str) -> None:
    """Partitions, leases and members move to other nodes, key by key or at once: nothing is lost or reordered."""
    migrate = getattr(cluster, how)
    async with scene_on(distribution=distribution) as scene:
        await scene.crew.hire(2)
        keys = scene.broker.keys
        async with scene.load(seconds=0.005):
            await scene.handles(100)
            scene.excuse("slots were moved")
            for partition in range(8):
                await anyio.to_thread.run_sync(migrate, keys.stream(TOPIC, partition))
                await scene.handles(20)
            for place in (keys.members(TOPIC, "crew"), keys.topic(TOPIC), keys.topics):
                await anyio.to_thread.run_sync(migrate, place)
            await scene.handles(200)
        verdict = await scene.verdict(seconds=30)
        assert not verdict.faults, verdict
        assert not any(hand.exit_code for hand in scene.crew.hands), f"a worker gave up: {scene.crew.log(20_000)}"


LONG = pytest.mark.skipif(
    os.environ.get("CHAOS") != "long",
    reason="20 s for what a killed master shows almost as well: runs with `make chaos`",
)


@pytest.mark.parametrize("how", ["kill", pytest.param("pause", marks=LONG)])
async def test_a_master_is_lost(scene_on: Callable[..., Scene], cluster: Cluster, how: str) -> None:
    """Its replica takes over, workers and publishers go on by themselves; what a replica had confirmed is handled."""
    async with scene_on(Replicated) as scene:
        await scene.crew.hire(2)
        stream = scene.broker.keys.stream(TOPIC, 0)
        victim = cluster.owner(stream)
        try:
            async with scene.load(seconds=0.005):
                await scene.handles(150)
                scene.excuse("a master was lost")
                scene.story.rewound = "a master was lost"
                getattr(victim, how)()
                others = [member for member in cluster.members if member is not victim]
                await scene.until(lambda: cluster.owner(stream, others) is not victim, "the replica has taken over")
                # it comes back as a replica: else no publish would be confirmed by one any more
                await anyio.to_thread.run_sync(victim.start if how == "kill" else victim.resume)
                await scene.handles(400)
            verdict = await scene.verdict(seconds=30)
        finally:
            await anyio.to_thread.run_sync(cluster.heal)
        assert not verdict.faults, verdict
        assert not any(hand.exit_code for hand in scene.crew.hands), f"a worker gave up: {scene.crew.log(20_000)}"
