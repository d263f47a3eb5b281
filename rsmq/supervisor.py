"""The parent of several worker processes: keeps them running, passes signals on, leaves when they have left.

What a signal or the end of a child means is decided by the pure functions below; `Supervisor` only acts. A child is any
command that obeys the same signals. Its stdin is a socket to the parent: it writes one byte when it is ready, and stops
by itself when the socket closes, so that no child outlives a parent that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Any, Final

import anyio
import anyio.abc

from rsmq.clock import monotonic

log = logging.getLogger("rsmq.supervisor")

CONFIG_ERROR: Final = 2
"""Exit code of a child that no restart can help."""


class Stage(IntEnum):
    """How far a worker has been told to stop. It only ever rises."""

    RUNNING = 0
    QUIET = 1  # take nothing new, finish what runs however long it takes, leave
    STOPPING = 2  # the same within the grace, then cancel and hand back
    ENDING = 3  # cancel and hand back now
    ABORTED = 4  # leave without a word: others take over when they see it


def respond(stage: Stage, number: int) -> Stage:
    """The stage after a signal: SIGUSR1 is quiet, each SIGTERM or SIGINT more urgent than the one before."""
    if number == signal.SIGUSR1:
        return max(stage, Stage.QUIET)
    if stage < Stage.STOPPING:
        return Stage.STOPPING
    return Stage(min(stage + 1, Stage.ABORTED))


FORWARD: Final = {
    Stage.QUIET: signal.SIGUSR1,
    Stage.STOPPING: signal.SIGTERM,
    Stage.ENDING: signal.SIGTERM,
    Stage.ABORTED: signal.SIGKILL,
}
"""What the parent sends to its children when it enters a stage."""


@contextmanager
def signals(on_signal: Callable[[int], object]) -> Iterator[None]:
    """Call `on_signal` for SIGTERM, SIGINT and SIGUSR1, also while the event loop is blocked. Main thread only."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda number, _: on_signal(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Verdict(Enum):
    """What to do about a child that has ended."""

    LEAVE = auto()
    RESTART = auto()  # at once: it was asked to make place for new code
    RESTART_LATER = auto()  # after the back-off
    AWAIT_CHANGE = auto()  # the code is broken and somebody is editing it
    STOP_ALL = auto()


def judge(code: int, stage: Stage, *, is_replaced: bool, is_reloading: bool) -> Verdict:
    """What follows from an exit code (negative: a signal). 0 is a child that has finished on its own account."""
    if stage > Stage.RUNNING:
        return Verdict.LEAVE
    if is_replaced:
        return Verdict.RESTART
    if code == CONFIG_ERROR:
        return Verdict.AWAIT_CHANGE if is_reloading else Verdict.STOP_ALL
    return Verdict.LEAVE if code == 0 else Verdict.RESTART_LATER


@dataclass(slots=True)
class Backoff:
    """How long to wait before the next start, in seconds: doubled each time, forgotten after a long life."""

    first: float = 0.1
    most: float = 10.0
    long_life: float = 30.0
    failures: int = 0

    def delay(self, lived: float) -> float:
        """The wait after a child that lived so many seconds."""
        if lived >= self.long_life:
            self.failures = 0
        delay = min(self.most, self.first * 2.0**self.failures)
        self.failures = min(self.failures + 1, 60)
        return delay


def reason(code: int) -> str:
    """An exit code for people."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class Supervisor:
    """Runs one command in `processes` processes until told to stop by signals.

    The first one starts alone, so that a mistake which all would make is reported once. `arguments` gives what the
    process of a slot (from 1) gets beyond the command. With `changes` (an async
    iterator that yields when the code has changed) the processes are replaced gracefully at each change.
    """

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        changes: Callable[[], AsyncIterator[Any]] | None = None,
        arguments: Callable[[int], Sequence[str]] = lambda slot: (),
    ) -> None:
        self.stage = Stage.RUNNING
        self.restarts = 0
        self._command, self._processes, self._changes = list(command), processes, changes
        self._arguments = arguments
        self._children: dict[int, anyio.abc.Process] = {}
        self._replaced: set[anyio.abc.Process] = set()
        self._exit_code = 0
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self._first_ready = asyncio.Event()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> int:
        """Keep the processes running until all have left; returns the exit code for this one."""
        loop = asyncio.get_running_loop()
        with signals(lambda number: loop.call_soon_threadsafe(self.obey, number)):
            task_status.started()
            async with anyio.create_task_group() as upkeep:
                if self._changes is not None:
                    upkeep.start_soon(self._reload, self._changes)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._keep, 1)
                    await self._first_ready.wait()
                    for slot in range(2, self._processes + 1):
                        tasks.start_soon(self._keep, slot)
                upkeep.cancel_scope.cancel()
        return self._exit_code

    @property
    def is_ready(self) -> bool:
        """Whether a child has ever said that it is ready."""
        return self._first_ready.is_set()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that run now."""
        return tuple(child.pid for child in self._children.values())

    def obey(self, number: int) -> None:
        """Enter the stage that a signal asks for, and tell the children."""
        stage = respond(self.stage, number)
        if stage != self.stage:
            log.info("%s: %s", signal.Signals(number).name, stage.name.lower())
            self._enter(stage)

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self._stopping.set()
        for child in self._children.values():
            self._tell(child, FORWARD[stage])

    def _tell(self, child: anyio.abc.Process, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)

    # -- one child ------------------------------------------------------------------------------------------------

    async def _keep(self, slot: int) -> None:
        """Keep one process running until it may leave."""
        backoff = Backoff()
        while self.stage == Stage.RUNNING:
            self._changed.clear()
            started = monotonic()
            code, is_replaced = await self._live(slot)
            lived = monotonic() - started
            match judge(code, self.stage, is_replaced=is_replaced, is_reloading=self._changes is not None):
                case Verdict.LEAVE:
                    log.info("worker %d %s", slot, reason(code))
                    if self.stage == Stage.RUNNING or code not in (0, -FORWARD[self.stage]):
                        self._exit_code = max(self._exit_code, int(code != 0))
                    break
                case Verdict.STOP_ALL:
                    self._exit_code = code
                    if self.stage == Stage.RUNNING:
                        self._enter(Stage.STOPPING)
                    break
                case Verdict.RESTART:
                    log.info("worker %d is replaced", slot)
                case Verdict.AWAIT_CHANGE:
                    log.info("worker %d waits for a change", slot)
                    await self._pause(None)
                case Verdict.RESTART_LATER:
                    delay = backoff.delay(lived)
                    self.restarts += 1
                    log.warning("worker %d %s after %.1f s: started again in %.1f s", slot, reason(code), lived, delay)
                    await self._pause(delay)
        self._first_ready.set()

    async def _live(self, slot: int) -> tuple[int, bool]:
        """One life of a child: its exit code, and whether it was asked to make place."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                # a session of its own: Ctrl-C is for the parent, which passes it on once
                child = await anyio.open_process(
                    [*self._command, *self._arguments(slot)],
                    stdin=theirs.fileno(),
                    stdout=None,
                    stderr=None,
                    start_new_session=True,
                )
            self._children[slot] = child
            if self.stage > Stage.RUNNING:
                self._tell(child, FORWARD[self.stage])
            log.info("worker %d has pid %d", slot, child.pid)
            try:
                await self._await_ready(ours)
                return await child.wait(), child in self._replaced
            finally:
                del self._children[slot]
                self._replaced.discard(child)

    async def _await_ready(self, ours: socket.socket) -> None:
        """Until the child says that it is ready, or has ended."""
        ours.setblocking(False)
        with contextlib.suppress(OSError):
            if await asyncio.get_running_loop().sock_recv(ours, 1):
                self._first_ready.set()

    async def _pause(self, seconds: float | None) -> None:
        """Wait, but not past a stop or a change of the code."""
        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._until, self._stopping, tasks.cancel_scope)
                tasks.start_soon(self._until, self._changed, tasks.cancel_scope)

    async def _until(self, event: asyncio.Event, scope: anyio.CancelScope) -> None:
        await event.wait()
        scope.cancel()

    # -- new code -------------------------------------------------------------------------------------------------

    async def _reload(self, changes: Callable[[], AsyncIterator[Any]]) -> None:
        async for _ in changes():
            if self.stage == Stage.RUNNING:
                log.info("the code has changed")
                self._changed.set()
                for child in self._children.values():
                    if child not in self._replaced:
                        self._replaced.add(child)
                        self._tell(child, signal.SIGTERM)

    def __repr__(self) -> str:
        return f"<Supervisor {self.stage.name.lower()} {len(self._children)}/{self._processes} processes>"
