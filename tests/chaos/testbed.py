"""A testbed: the servers, proxies and processes of one scenario, which it stops at the end."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

import anyio

from rsmq.testing.proxy import Proxy
from tests.chaos.bank import Bank
from tests.chaos.processes import ChaosProcess
from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.system_faults import FaultyServer
from tests.servers import Kind, Server

S = TypeVar("S", bound=Server)
R = TypeVar("R", bound=ScenarioRun)

CALM = 5.0
"""A lease in seconds, for scenarios in which no worker may lose one: a busy machine can stand still for more than 1 s,
which is enough for the usual lease of 2 s."""


class Testbed:
    """Servers of one kind and runs on them, all with the same seed and duration.

    `has_bank`: handlers book their messages in a database, where the scenario allows it. `seconds`: the least duration
    of each phase under load without faults; `minutes`: the duration of a scenario that has no end of its own. `run` is
    the last run that was started.
    """

    __test__ = False  # pytest: not a class of tests

    def __init__(
        self,
        kind: Kind,
        seed: int,
        seconds: float,
        path: Path,
        shared: Server | None = None,
        minutes: float = 10,
        *,
        has_bank: bool = False,
    ) -> None:
        self.kind, self.seed, self.seconds, self.minutes, self._path = kind, seed, seconds, minutes, path
        self._shared, self._stack = shared, AsyncExitStack()
        self.run: ScenarioRun | None = None
        self.has_bank = has_bank
        self._bank: Bank | None = None

    async def server(self, *args: str, **options: Any) -> Server:
        """A server for this scenario alone, with an append-only file: killed, it keeps what it has confirmed."""
        return await self._started(Server(*args, kind=self.kind, **{"aof": True, **options}))

    async def faulty_server(self, *args: str, **options: Any) -> FaultyServer:
        """A server whose power, disk and clock the test controls. Skips without a C compiler."""
        return await self._started(FaultyServer(*args, kind=self.kind, **options))

    async def shared_server(self) -> Server:
        """A server that the scenario does not harm: the test session's, if there is one."""
        return self._shared or await self.server(aof=False)

    async def proxy(self, server: Server) -> Proxy:
        """A proxy in front of a server."""
        return await self._stack.enter_async_context(Proxy(server.port))

    async def start(self, server: Server, workers: int = 3, **job: Any) -> ScenarioRun:
        """A run with workers that serve."""
        return await self.begin(ScenarioRun, server.url, workers, **job)

    async def begin(self, kind: type[R], url: str, /, workers: int = 3, **job: Any) -> R:
        """A run of a kind of its own, of clients that connect to `url`."""
        is_inline = job.get("execution", "inline") == "inline"
        has_till = kind.has_till and is_inline and job.get("distribution", "hash") == "hash" and not job.get("output")
        if self.has_bank and has_till:
            job["bank"] = await self.database()
        run = await self._stack.enter_async_context(
            kind(self._path, url, self.seed, **{"seconds": self.seconds, **job})
        )
        self.run = run
        await run.processes.start_workers(workers)
        return run

    async def database(self) -> str:
        """A new database of the bank."""
        if self._bank is None:
            self._bank = await anyio.to_thread.run_sync(Bank)
            self._stack.callback(self._bank.close)
        return await anyio.to_thread.run_sync(self._bank.open)

    async def _started(self, server: S) -> S:
        self._stack.callback(server.close)
        await anyio.to_thread.run_sync(server.start)
        return server

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)


def ask(server: Server, *command: Any) -> Any:
    """Send a command without rsmq."""
    with server.client() as client:
        return client.execute_command(*command)


async def paused(worker: ChaosProcess, seconds: float) -> None:
    """SIGSTOP, and SIGCONT after so long: the pause is the fault."""
    worker.pause()
    await anyio.sleep(seconds)
    worker.resume()


async def kill_and_pause(run: ScenarioRun, proxy: Proxy, turn: int) -> None:
    """At a random moment the busiest worker is killed, between two resets of all connections of the caller; in every
    other turn the next one is paused for two leases."""
    await anyio.sleep(0.5 + run.random.random())  # a random moment: the fault under test
    proxy.reset()
    victim = run.busiest()
    victim.kill()
    run.excuse("killed", victim)
    await run.processes.start_workers(1)
    proxy.reset()
    if turn % 2:
        sleeper = run.busiest()
        run.excuse("paused", sleeper)
        await paused(sleeper, 2 * run.job.lease)
