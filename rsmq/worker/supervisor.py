"""The parent of several worker processes: restarts them, forwards signals, and ends when all of them have ended.

Pure functions decide what follows from a signal or the end of a child; `Supervisor` acts on it. A child is any command
that handles the same signals. Its stdin is a socket to the parent: the child stops when the socket closes, so no child
outlives a killed parent. It writes a line when it is ready, one that names its member, and one that says how it ends:
user code can end a process with any exit code, so the exit code alone says nothing. The parent writes a line to each
child that serves when the process of another member has ended: its siblings need not wait until they believe that.
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

from rsmq.model.backoff import Backoff
from rsmq.model.clock import monotonic
from rsmq.model.words import describe_exit

log = logging.getLogger("rsmq.supervisor")

CONFIG_ERROR: Final = 2
"""Exit code for a configuration error: a restart would fail again."""
READY: Final = b"ready"
FINISHED: Final = b"finished"
MISCONFIGURED: Final = b"misconfigured"
EXHAUSTED: Final = b"exhausted"
"""What a child writes: that it is ready, that it was stopped and ends, that its configuration is wrong, that it has
handled as many messages as one process shall."""
MEMBER: Final = b"member"
"""What a child writes before its member id."""
END_NOW: Final = b"end now"
"""What the parent writes when handlers are to be cancelled now. A second signal would not say it: a service manager, or
`kill` of a process group, signals parent and children, so that each child gets two where one was meant."""
ENDED: Final = b"ended"
"""What the parent writes before the id of a member whose process has ended."""
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 10.0
"""Seconds before a child that failed is started again."""
LONG_LIFE: Final = 30.0
"""Seconds after which the start of a child counts as successful."""


class Stage(IntEnum):
    """How urgently a worker must stop. It never falls back to an earlier stage."""

    RUNNING = 0
    QUIET = 1  # fetch nothing new, let running handlers finish without a deadline, end
    STOPPING = 2  # the same within the grace, then cancel handlers and hand messages back
    ENDING = 3  # cancel handlers and hand messages back now
    ABORTED = 4  # end without handing anything back: other members take over when they notice


def respond(stage: Stage, number: int) -> Stage:
    """The stage after a signal. SIGUSR1 stops fetching and lets running handlers finish; each SIGTERM, SIGINT or
    SIGHUP is more urgent than the one before."""
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
"""The signal that the parent sends to its children when it enters a stage; those that serve count it once."""


@contextmanager
def signals(
    on_signal: Callable[[int], object], *, has_hangup: bool = False
) -> Iterator[Callable[[], list[signal.Signals]]]:
    """Call `on_signal` for SIGTERM, SIGINT, SIGHUP and SIGUSR1, even while the event loop is blocked. Main thread only.

    Gives a function that takes SIGTERM and SIGINT back from a module that was imported meanwhile, and returns those
    that it had taken.

    SIGHUP, the end of the terminal, stays ignored where the process was started so, as by `nohup`: unless it has a
    meaning of its own (`has_hangup`).
    """
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if has_hangup or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def call(number: int, _frame: object) -> None:
        on_signal(number)

    def take_back() -> list[signal.Signals]:
        taken = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not call]
        for number in taken:
            signal.signal(number, call)
        return taken

    before = {number: signal.signal(number, call) for number in numbers}
    try:
        yield take_back
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class RestartDecision(Enum):
    """The next step after the end of a child."""

    END = auto()
    RESTART = auto()  # at once: its code has changed, or it has handled as many messages as one process shall
    RESTART_LATER = auto()  # after the back-off
    AWAIT_CHANGE = auto()  # under --reload: its code is broken and being edited
    STOP_ALL = auto()


def decide(code: int, stage: Stage, last_word: bytes, *, is_replaced: bool, is_reloading: bool) -> RestartDecision:
    """Decide from the exit code (negative: a signal) and from what the child wrote last, perhaps nothing."""
    if stage > Stage.RUNNING:
        return RestartDecision.END
    if is_replaced or (last_word == EXHAUSTED and code == 0):
        return RestartDecision.RESTART
    if last_word == MISCONFIGURED:
        return RestartDecision.AWAIT_CHANGE if is_reloading else RestartDecision.STOP_ALL
    return RestartDecision.END if code == 0 and last_word == FINISHED else RestartDecision.RESTART_LATER


def restart_delay(backoff: Backoff, lived: float) -> float:
    """Seconds until a child that lived so long is started again. After a long life the back-off starts anew."""
    if lived >= LONG_LIFE:
        backoff.reset()
    return backoff.next()


def is_orderly(code: int, number: int) -> bool:
    """Whether this is how a child ends that was sent this signal: in order, or before it could handle signals, by the
    signal or with the exit code that shells have for it."""
    return code in (0, -number, 128 + number)


@dataclass(eq=False)
class Child:
    """One process, the socket to it, and what it has written."""

    process: anyio.abc.Process
    link: socket.socket
    last_word: bytes = b""
    member: bytes = b""
    is_replaced: bool = False
    is_outdated: bool = False
    """Whether its files have changed before it was ready."""
    _rest: bytes = b""

    def read(self) -> list[bytes] | None:
        """The lines that it has written since the last call; None when it has closed the socket."""
        try:
            data = self.link.recv(4096)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines if data else None

    def write(self, line: bytes) -> None:
        """Write a line. A child that has ended, or that has read nothing for long, does not get it."""
        with contextlib.suppress(OSError):
            self.link.send(line + b"\n")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Supervisor:
    """Runs one command in `processes` processes until signals stop it.

    The first process starts alone, so that an error in the configuration is reported once. `arguments` returns the
    extra arguments for the process of a slot (from 1). With `changes`, an async iterator that yields when the code has
    changed, the processes are restarted gracefully at each change. With `rereads`, SIGHUP is passed on, so that each
    process reads its files again. Else it stops them.
    """

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        changes: Callable[[], AsyncIterator[Any]] | None = None,
        arguments: Callable[[int], Sequence[str]] = lambda slot: (),
        *,
        rereads: bool = False,
    ) -> None:
        self.stage = Stage.RUNNING
        self.restarts = 0
        self._command = list(command)
        self._processes = processes
        self._changes = changes
        self._arguments, self._rereads = arguments, rereads
        self._children: dict[int, Child] = {}
        self._ended: dict[int, bytes] = {}  # slot -> the last member whose process has ended
        self._exit_code = 0
        self._interrupt = asyncio.Event()  # a stop, or a change of the code
        self._first_ready = asyncio.Event()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> int:
        """Keep the processes running until all have ended; returns the exit code of the parent."""
        loop = asyncio.get_running_loop()
        with signals(lambda number: loop.call_soon_threadsafe(self.obey, number), has_hangup=self._rereads):
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
        """Whether any child has been ready."""
        return self._first_ready.is_set()

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the processes that run now."""
        return tuple(child.process.pid for child in self._children.values())

    def obey(self, number: int) -> None:
        """Enter the stage that a signal asks for and forward it to the children."""
        if number == signal.SIGHUP and self._rereads:
            for child in self._children.values():
                self._reread(child)
            return
        stage = respond(self.stage, number)
        if stage != self.stage:
            log.info("%s: %s", signal.Signals(number).name, stage.name.lower())
            self._enter(stage)

    def _reread(self, child: Child) -> None:
        """Let a process read its files again. One that is not ready may not handle the signal yet: it would end."""
        child.is_outdated = child.last_word != READY
        if not child.is_outdated:
            child.signal(signal.SIGHUP)

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self._interrupt.set()
        for child in self._children.values():
            if stage == Stage.ENDING:
                child.write(END_NOW)
            child.signal(FORWARD[stage])

    # -- one child ------------------------------------------------------------------------------------------------

    async def _keep(self, slot: int) -> None:
        """Keep one process running until `decide` ends it."""
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while self.stage == Stage.RUNNING:
            self._interrupt.clear()
            started = monotonic()
            code, child = await self._run_child(slot)
            lived = monotonic() - started
            is_replaced, is_reloading = child.is_replaced, self._changes is not None
            match decide(code, self.stage, child.last_word, is_replaced=is_replaced, is_reloading=is_reloading):
                case RestartDecision.END:
                    log.info("worker %d %s", slot, describe_exit(code))
                    if self.stage == Stage.RUNNING or not is_orderly(code, FORWARD[self.stage]):
                        self._exit_code = max(self._exit_code, int(code != 0))
                    break
                case RestartDecision.STOP_ALL:
                    self._exit_code = CONFIG_ERROR
                    if self.stage == Stage.RUNNING:
                        self._enter(Stage.STOPPING)
                    break
                case RestartDecision.RESTART:
                    log.info("worker %d is started again", slot)
                case RestartDecision.AWAIT_CHANGE:
                    log.info("worker %d waits for a change of the code", slot)
                    await self._pause(None)
                case RestartDecision.RESTART_LATER:
                    delay = restart_delay(backoff, lived)
                    self.restarts += 1
                    ending = describe_exit(code)
                    log.warning("worker %d %s after %.1f s: restarting in %.1f s", slot, ending, lived, delay)
                    await self._pause(delay)
        self._first_ready.set()

    async def _run_child(self, slot: int) -> tuple[int, Child]:
        """Run one child to its end; returns its exit code and what it has written."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                # a session of its own: Ctrl-C goes only to the parent, which forwards it once
                command = [*self._command, *self._arguments(slot)]
                process = await anyio.open_process(
                    command, stdin=theirs.fileno(), stdout=None, stderr=None, start_new_session=True
                )
            child = self._children[slot] = Child(process, ours)
            if self.stage > Stage.RUNNING:
                child.signal(FORWARD[self.stage])
            log.info("worker %d has pid %d", slot, process.pid)
            loop.add_reader(ours, self._hear, child)
            try:
                code = await process.wait()
                self._hear(child)
            finally:
                loop.remove_reader(ours)
                del self._children[slot]
            self._announce_end(slot, child)
            return code, child

    def _hear(self, child: Child) -> None:
        """Act on what a child has written."""
        lines = child.read()
        if lines is None:
            asyncio.get_running_loop().remove_reader(child.link)
        for line in lines or ():
            word, _, member = line.partition(b" ")
            if word == MEMBER:
                child.member = member
                for ended in self._ended.values():
                    child.write(b"%b %b" % (ENDED, ended))
            else:
                child.last_word = word
                if word == READY:
                    self._first_ready.set()
                    if child.is_outdated:
                        self._reread(child)

    def _announce_end(self, slot: int, child: Child) -> None:
        """Write to the siblings that the process of a member has ended; one that starts later learns it, too.

        Called only when the system has confirmed the end: `wait` has returned.
        """
        if child.member:
            self._ended[slot] = child.member
            for sibling in self._children.values():
                if sibling.member:
                    sibling.write(b"%b %b" % (ENDED, child.member))

    async def _pause(self, seconds: float | None) -> None:
        """Wait; a stop or a change of the code ends it early."""
        with anyio.move_on_after(seconds):
            await self._interrupt.wait()

    async def _reload(self, changes: Callable[[], AsyncIterator[Any]]) -> None:
        async for _ in changes():
            if self.stage == Stage.RUNNING:
                log.info("the code has changed")
                self._interrupt.set()
                for child in self._children.values():
                    if not child.is_replaced:
                        child.is_replaced = True
                        child.signal(signal.SIGTERM)

    def __repr__(self) -> str:
        return f"<Supervisor {self.stage.name.lower()} {len(self._children)}/{self._processes} processes>"
