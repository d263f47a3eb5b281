"""Faults of every kind at random, for as long as one likes, a quarter of the time in peace."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import anyio
import redis

from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Verdict
from tests.chaos.crew import Hand
from tests.chaos.proxy import Proxy
from tests.chaos.publisher import Errand
from tests.chaos.scenarios.keys import PARTITIONS
from tests.chaos.scene import Scene
from tests.chaos.stage import Stage, ask
from tests.chaos.weather import WeatheredServer
from tests.chaos.worker import GROUP, TOPIC

MOST_WORKERS = 4
QUIET = 0.25
"""The part of the time in which nothing is done to anybody."""

RATE = 200
"""Messages a second of the publisher's process: the workers must be able to follow, between faults."""


class Trouble:
    """One method a fault; each leaves everything as it was, so that the next one meets a whole system."""

    def __init__(self, scene: Scene, server: WeatheredServer, line: Proxy) -> None:
        self._scene, self._server, self._line, self._dice = scene, server, line, scene.random
        self._lease = scene.job.lease
        self.done: list[str] = []

    def faults(self) -> list[Callable[[], Awaitable[None]]]:
        """All of them."""
        return [getattr(self, name) for name in dir(self) if name.startswith("on_")]

    async def strike(self) -> None:
        """One fault at random."""
        fault = self._dice.choice(self.faults())
        self.done.append(fault.__name__.removeprefix("on_").replace("_", " "))
        self._scene.excuse("the mix")
        await fault()
        await self._staff()
        self._scene.excuse("the mix")

    async def _staff(self) -> None:
        """Who has died is replaced, some of them behind the line."""
        while len(self._scene.crew.living) < 3:
            is_far = self._dice.random() < 0.5
            await self._scene.crew.hire(1, replace(self._scene.job, url=self._line.url) if is_far else None)

    def _somebody(self) -> list[Hand]:
        return [self._scene.busiest()] if self._dice.random() < 0.7 else list(self._scene.crew.living)

    async def on_kill(self) -> None:
        for hand in self._somebody():
            hand.kill()

    async def on_nap(self) -> None:
        await self._sleep(0.5)

    async def on_long_pause(self) -> None:
        await self._sleep(2.0)

    async def _sleep(self, leases: float) -> None:
        hands = self._somebody()
        for hand in hands:
            hand.pause()
        await anyio.sleep(leases * self._lease)
        for hand in hands:
            hand.resume()

    async def on_sigterm(self) -> None:
        leaver = self._scene.busiest()
        leaver.terminate()
        assert await leaver.ended() == 0, self._scene.crew.log()

    async def on_scale_up(self) -> None:
        if len(self._scene.crew.living) < MOST_WORKERS:
            await self._scene.crew.hire()

    async def on_server_restart(self) -> None:
        self._server.kill()
        await anyio.sleep(self._dice.random())
        await anyio.to_thread.run_sync(self._server.start)

    async def on_server_stands_still(self) -> None:
        self._server.pause()
        await anyio.sleep(self._dice.random() * 2 * self._lease)
        self._server.resume()

    async def on_connections_killed(self) -> None:
        for _ in range(5):
            ask(self._server, "CLIENT", "KILL", "TYPE", self._dice.choice(["normal", "pubsub"]), "SKIPME", "yes")
            await anyio.sleep(0.2)

    async def on_line_cut(self) -> None:
        self._line.cut()
        await anyio.sleep(self._dice.random() * 2 * self._lease)
        self._line.mend()

    async def on_line_reset(self) -> None:
        for _ in range(10):
            self._line.reset()
            await anyio.sleep(0.1)

    async def on_slow_line(self) -> None:
        self._line.delay = lambda: self._dice.random() * 0.1
        await anyio.sleep(2)
        self._line.delay = None

    async def on_out_of_memory(self) -> None:
        ask(self._server, "CONFIG", "SET", "maxmemory", 1)
        await anyio.sleep(self._dice.random() * 2 * self._lease)
        ask(self._server, "CONFIG", "SET", "maxmemory", 0)

    async def on_disk_full(self) -> None:
        with self._server.weather.full_disk():
            await anyio.sleep(self._dice.random() * 2 * self._lease)

    async def on_clock_step(self) -> None:
        self._server.weather.step_clock(self._dice.choice([-3600, 3600]))
        await anyio.sleep(1)
        self._server.weather.step_clock(0)

    async def on_scripts_forgotten(self) -> None:
        ask(self._server, "SCRIPT", "FLUSH")

    async def on_leases_deleted(self) -> None:
        keys = self._scene.broker.keys
        ask(self._server, "DEL", *(keys.lease(TOPIC, partition, GROUP) for partition in PARTITIONS))

    async def on_members_deleted(self) -> None:
        ask(self._server, "DEL", self._scene.broker.keys.members(TOPIC, GROUP))

    async def on_demotion(self) -> None:
        ask(self._server, "REPLICAOF", "127.0.0.1", 1)
        await anyio.sleep(self._dice.random() * self._lease)
        ask(self._server, "REPLICAOF", "NO", "ONE")

    async def on_rewrite(self) -> None:
        with suppress(redis.ResponseError):  # one is under way
            ask(self._server, "BGREWRITEAOF")

    async def on_publisher_killed(self) -> None:
        publisher = self._scene.crew.publishers[-1]
        publisher.kill()
        job = replace(self._scene.job, url=self._line.url) if self._dice.random() < 0.5 else self._scene.job
        many = self._dice.choice([1, 20, 200])
        await self._scene.crew.send(Errand(job, many=many, pause=many / RATE, seed=self._dice.randrange(10**6)))


@scenario("A24", injection="faults at random, each leaves a whole system to the next; a quarter of the time is quiet",
          servers=ONE)  # fmt: skip
async def mix(stage: Stage) -> Verdict:
    """Nobody knows what comes next; the seed does."""
    server = await stage.weathered(tcp=True)
    line = await stage.line(server)
    scene = await stage.on(server, workers=2, attempts=30, seconds=0)
    await scene.crew.hire(1, replace(scene.job, url=line.url))
    await scene.crew.send(Errand(scene.job, many=20, pause=20 / RATE, seed=stage.seed))
    scene.story.rewound = "the mix"
    trouble, end = Trouble(scene, server, line), time.monotonic() + stage.minutes * 60
    async with scene.load(burst=5, seconds=0.005):
        while time.monotonic() < end:
            began = time.monotonic()
            await trouble.strike()
            await scene.heals(90)
            await anyio.sleep((time.monotonic() - began) * QUIET / (1 - QUIET))  # peace
    print(f"{len(trouble.done)} faults: {', '.join(trouble.done)}")
    return await scene.verdict(120)
