"""The processes of a handler with `execution="process"`: made when they are needed, and ended when they are idle.

Not `anyio.to_process`, which talks over the standard streams: a handler that printed or started a program there broke
its own message, and one that raised SystemExit the next message of another key.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final, Self

import anyio
import anyio.to_thread

from rsmq.handler.child_process import COMMAND, LENGTH
from rsmq.handler.failure import describe
from rsmq.model.clock import awake
from rsmq.model.words import describe_exit

IDLE_SECONDS: Final = 300.0
"""A process without work for this long is ended: it may hold much memory."""


def spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A new process, and the socket to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", COMMAND, "\n".join(sys.path)]
        return subprocess.Popen(command, stdin=theirs.fileno()), ours


class HandlerProcess:
    """One process and the socket to it. It runs one call at a time."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._rests_since = awake()

    @classmethod
    async def start(cls) -> Self:
        """Start one, and import the main module of this program there. Raises anyio.BrokenWorkerProcess."""
        process, ours = spawn()
        try:
            child = cls(process, *await asyncio.open_connection(sock=ours))
            is_done, result = await child._exchange(pickle.dumps((os.getpid(), main_program(), sys.argv)))
        except BaseException:
            ours.close()
            await ended(process)
            raise
        if not is_done:
            await child.end()
            raise anyio.BrokenWorkerProcess(f"the process of the handler cannot start: {describe(result)}") from result
        return child

    async def call(self, request: bytes) -> Any:
        """Run a pickled function with its arguments there. Raises its error, or anyio.BrokenWorkerProcess; after that,
        and after a cancellation, the process has ended."""
        try:
            is_done, result = await self._exchange(request)
        except BaseException:
            await self.end()
            raise
        if not is_done:
            raise result
        return result

    async def _exchange(self, request: bytes) -> tuple[bool, Any]:
        try:
            self._writer.write(request)
            await self._writer.drain()
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            data = await self._reader.readexactly(length)
        except (EOFError, ConnectionError) as error:
            code = await ended(self._process)
            raise anyio.BrokenWorkerProcess(f"the process of the handler {describe_exit(code)}") from error
        return pickle.loads(data)  # type: ignore[no-any-return]

    @property
    def has_ended(self) -> bool:
        """Whether its end is known."""
        return self._process.returncode is not None

    @property
    def rested(self) -> float:
        """Seconds since `rest`."""
        return awake() - self._rests_since

    def rest(self) -> None:
        """It has nothing to do from now on."""
        self._rests_since = awake()

    async def end(self) -> None:
        """End it, also while it runs a call."""
        self._writer.close()
        await ended(self._process)


def main_program() -> tuple[str | None, str | None]:
    """How the main module of this program is found: its name, if it was started by that, and its file."""
    main = sys.modules["__main__"]
    sys.modules.setdefault("__mp_main__", main)  # what comes back may be of a class that is defined there
    spec = getattr(main, "__spec__", None)
    return None if spec is None else spec.name, getattr(main, "__file__", None)


async def ended(process: subprocess.Popen[bytes]) -> int:
    """Kill a process that is still there. Returns its exit code: its own, if it has ended by itself.

    In a thread: the end of a process with much memory takes a while.
    """
    process.kill()
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(process.wait, limiter=anyio.CapacityLimiter(1))
    return process.wait()


class ProcessPool:
    """Up to `most` processes, which run one call each."""

    def __init__(self, most: int) -> None:
        self._limiter = anyio.CapacityLimiter(most)
        self._resting: list[HandlerProcess] = []
        self._ends = set[asyncio.Task[None]]()
        self._look: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in one of them. A cancellation ends its process, and so its call."""
        request = pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL)
        async with self._limiter:
            process = self._resting.pop() if self._resting else await HandlerProcess.start()
            try:
                return await process.call(request)
            finally:
                if not process.has_ended:
                    process.rest()
                    self._resting.append(process)
                    self._look_later()

    def _look_later(self) -> None:
        if self._look is None and self._resting:
            seconds = max(0.0, IDLE_SECONDS - self._resting[0].rested)
            self._look = asyncio.get_running_loop().call_later(seconds, self._end_idle)

    def _end_idle(self) -> None:
        """End those that have had nothing to do. The one that has rested longest is the first."""
        self._look = None
        while self._resting and self._resting[0].rested >= IDLE_SECONDS:
            self._end_soon(self._resting.pop(0))
        self._look_later()

    def _end_soon(self, process: HandlerProcess) -> None:
        task = asyncio.create_task(process.end())
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def close(self) -> None:
        """End all of them: no call runs any more."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        while self._resting:
            self._end_soon(self._resting.pop())
        if self._ends:
            await asyncio.wait(self._ends)
