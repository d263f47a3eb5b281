"""Random faults of every kind for a given time, a quarter of it without faults."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import anyio
import redis

from rsmq.testing.proxy import Proxy
from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Verdict
from tests.chaos.processes import ChaosProcess
from tests.chaos.publisher import PublisherJob
from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.scenarios.keys import PARTITIONS
from tests.chaos.system_faults import FaultyServer
from tests.chaos.testbed import Testbed, ask
from tests.chaos.worker import GROUP, TOPIC

MOST_WORKERS = 4
QUIET = 0.25
"""The share of the time without faults."""

RATE = 200
"""Messages a second of the publisher process: the workers must keep up between faults."""


class RandomFaults:
    """One method per fault. Each ends its fault, so that the next one starts from a whole system."""

    def __init__(self, run: ScenarioRun, server: FaultyServer, proxy: Proxy) -> None:
        self._run, self._server, self._proxy, self._random = run, server, proxy, run.random
        self._lease = run.job.lease
        self.done: list[str] = []

    def faults(self) -> list[Callable[[], Awaitable[None]]]:
        """All fault methods."""
        return [getattr(self, name) for name in dir(self) if name.startswith("on_")]

    async def inject(self) -> None:
        """Inject one fault at random."""
        fault = self._random.choice(self.faults())
        self.done.append(fault.__name__.removeprefix("on_").replace("_", " "))
        self._run.excuse("the mix")
        await fault()
        await self._replace_dead()
        self._run.excuse("the mix")

    async def _replace_dead(self) -> None:
        """Replace dead workers, some by workers behind the proxy."""
        while len(self._run.processes.living) < 3:
            is_behind_proxy = self._random.random() < 0.5
            await self._run.processes.start_workers(
                1, replace(self._run.job, url=self._proxy.url) if is_behind_proxy else None
            )

    def _victims(self) -> list[ChaosProcess]:
        return [self._run.busiest()] if self._random.random() < 0.7 else list(self._run.processes.living)

    async def on_kill(self) -> None:
        for worker in self._victims():
            worker.kill()

    async def on_nap(self) -> None:
        await self._sleep(0.5)

    async def on_long_pause(self) -> None:
        await self._sleep(2.0)

    async def _sleep(self, leases: float) -> None:
        workers = self._victims()
        for worker in workers:
            worker.pause()
        await anyio.sleep(leases * self._lease)
        for worker in workers:
            worker.resume()

    async def on_sigterm(self) -> None:
        leaver = self._run.busiest()
        leaver.terminate()
        assert await leaver.ended() == 0, self._run.processes.log()

    async def on_scale_up(self) -> None:
        if len(self._run.processes.living) < MOST_WORKERS:
            await self._run.processes.start_workers()

    async def on_server_restart(self) -> None:
        self._server.kill()
        await anyio.sleep(self._random.random())
        await anyio.to_thread.run_sync(self._server.start)

    async def on_server_stands_still(self) -> None:
        self._server.pause()
        await anyio.sleep(self._random.random() * 2 * self._lease)
        self._server.resume()

    async def on_connections_killed(self) -> None:
        for _ in range(5):
            ask(self._server, "CLIENT", "KILL", "TYPE", self._random.choice(["normal", "pubsub"]), "SKIPME", "yes")
            await anyio.sleep(0.2)

    async def on_link_cut(self) -> None:
        self._proxy.cut()
        await anyio.sleep(self._random.random() * 2 * self._lease)
        self._proxy.mend()

    async def on_link_reset(self) -> None:
        for _ in range(10):
            self._proxy.reset()
            await anyio.sleep(0.1)

    async def on_slow_link(self) -> None:
        self._proxy.delay = lambda: self._random.random() * 0.1
        await anyio.sleep(2)
        self._proxy.delay = None

    async def on_out_of_memory(self) -> None:
        ask(self._server, "CONFIG", "SET", "maxmemory", 1)
        await anyio.sleep(self._random.random() * 2 * self._lease)
        ask(self._server, "CONFIG", "SET", "maxmemory", 0)

    async def on_disk_full(self) -> None:
        with self._server.faults.full_disk():
            await anyio.sleep(self._random.random() * 2 * self._lease)

    async def on_clock_step(self) -> None:
        self._server.faults.step_clock(self._random.choice([-3600, 3600]))
        await anyio.sleep(1)
        self._server.faults.step_clock(0)

    async def on_scripts_forgotten(self) -> None:
        ask(self._server, "SCRIPT", "FLUSH")

    async def on_leases_deleted(self) -> None:
        keys = self._run.broker.keys
        ask(self._server, "DEL", *(keys.lease(TOPIC, partition, GROUP) for partition in PARTITIONS))

    async def on_members_deleted(self) -> None:
        ask(self._server, "DEL", self._run.broker.keys.members(TOPIC, GROUP))

    async def on_demotion(self) -> None:
        ask(self._server, "REPLICAOF", "127.0.0.1", 1)
        await anyio.sleep(self._random.random() * self._lease)
        ask(self._server, "REPLICAOF", "NO", "ONE")

    async def on_rewrite(self) -> None:
        with suppress(redis.ResponseError):  # a rewrite is already running
            ask(self._server, "BGREWRITEAOF")

    async def on_publisher_killed(self) -> None:
        publisher = self._run.processes.publishers[-1]
        publisher.kill()
        job = replace(self._run.job, url=self._proxy.url) if self._random.random() < 0.5 else self._run.job
        many = self._random.choice([1, 20, 200])
        await self._run.processes.start_publisher(
            PublisherJob(job, many=many, pause=many / RATE, seed=self._random.randrange(10**6))
        )


@scenario("A24", injection="random faults, one after the other; a quarter of the time without faults",
          servers=ONE)  # fmt: skip
async def mix(testbed: Testbed) -> Verdict:
    """The seed decides which fault comes next."""
    server = await testbed.faulty_server(tcp=True)
    proxy = await testbed.proxy(server)
    run = await testbed.start(server, workers=2, attempts=30, seconds=0)
    await run.processes.start_workers(1, replace(run.job, url=proxy.url))
    await run.processes.start_publisher(PublisherJob(run.job, many=20, pause=20 / RATE, seed=testbed.seed))
    run.history.rewound = "the mix"
    faults, end = RandomFaults(run, server, proxy), time.monotonic() + testbed.minutes * 60
    async with run.load(burst=5, seconds=0.005):
        while time.monotonic() < end:
            began = time.monotonic()
            await faults.inject()
            await run.recovers(90)
            await anyio.sleep((time.monotonic() - began) * QUIET / (1 - QUIET))  # without faults
    print(f"{len(faults.done)} faults: {', '.join(faults.done)}")
    return await run.verdict(120)
