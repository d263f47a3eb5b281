"""A stage: what one run of one scenario is given, and what it takes down afterwards."""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

import anyio

from tests.chaos.crew import Hand
from tests.chaos.proxy import Proxy
from tests.chaos.scene import Scene
from tests.chaos.weather import WeatheredServer
from tests.servers import Kind, Server

S = TypeVar("S", bound=Server)


class Stage:
    """Servers of one kind, scenes on them, all with the run's seed and duration.

    `seconds`: how long each quiet phase under load lasts at least; `minutes`: a scenario that has no end of its own.
    """

    def __init__(
        self, kind: Kind, seed: int, seconds: float, path: Path, shared: Server | None = None, minutes: float = 10
    ) -> None:
        self.kind, self.seed, self.seconds, self.minutes, self._path = kind, seed, seconds, minutes, path
        self._shared, self._stack = shared, AsyncExitStack()
        self.scene: Scene | None = None

    async def server(self, *args: str, **options: Any) -> Server:
        """A server of this run's own, which keeps what it is told (appendfsync everysec)."""
        return await self._started(Server(*args, kind=self.kind, **{"aof": True, **options}))

    async def weathered(self, *args: str, **options: Any) -> WeatheredServer:
        """One whose power, disk and clock are ours. Skips without a C compiler."""
        return await self._started(WeatheredServer(*args, kind=self.kind, **options))

    async def common(self) -> Server:
        """One that is left alone: shared by the run where there is one."""
        return self._shared or await self.server(aof=False)

    async def line(self, server: Server) -> Proxy:
        """A line to a server that can be cut."""
        return await self._stack.enter_async_context(Proxy(server.port))

    async def on(self, server: Server, workers: int = 3, **job: Any) -> Scene:
        """A scene with workers that serve."""
        scene = Scene(self._path, server.url, self.seed, **{"seconds": self.seconds, **job})
        self.scene = await self._stack.enter_async_context(scene)
        await scene.crew.hire(workers)
        return scene

    async def _started(self, server: S) -> S:
        self._stack.callback(server.close)
        await anyio.to_thread.run_sync(server.start)
        return server

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A directory for the ledger of a run."""
    return tempfile.TemporaryDirectory(prefix="rsmq-chaos-")


def ask(server: Server, *command: Any) -> Any:
    """A command behind rsmq's back."""
    with server.client() as client:
        return client.execute_command(*command)


async def paused(hand: Hand, seconds: float) -> None:
    """SIGSTOP, and SIGCONT after so long: the pause is the fault."""
    hand.pause()
    await anyio.sleep(seconds)
    hand.resume()
