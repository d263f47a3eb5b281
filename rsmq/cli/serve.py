"""Serves one broker in this process: signals, the end of the parent process, the grace, the garbage collector."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import anyio

from rsmq.broker import Broker
from rsmq.cli.load_broker import current_directory
from rsmq.handler.failure import describe
from rsmq.handler.selection import Serving
from rsmq.model.interrupt import mark
from rsmq.worker.supervisor import END_NOW, ENDED, EXHAUSTED, FINISHED, MEMBER, READY, Stage, respond
from rsmq.worker.worker import Lifespan, Worker

log = logging.getLogger("rsmq.worker")

STDIN: Final = 0
ALL: Final = Serving()
SLACK: Final = 15.0
"""Seconds beyond grace and lease that an orderly end may take (replies, goodbyes)."""


class ServedProcess:
    """Handles the signals of one process. Before a broker is served a signal ends the process at once.

    Invariant: after a stop signal the process ends within the grace and a lease, even if a handler blocks the loop or
    ignores cancellation.
    """

    def __init__(self, grace: timedelta | None, serving: Serving = ALL) -> None:
        self.stage = Stage.RUNNING
        self._serving = serving
        self._worker: Worker | None = None
        self._grace = grace
        self._broker: Broker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scope: anyio.CancelScope | None = None
        self._parent = STDIN

    def obey(self, number: int) -> None:
        """Handle a signal. Called in the main thread, perhaps in the middle of a handler that blocks the loop.

        A child process counts signals once, because its parent's come beside those of others: see `END_NOW`.
        """
        stage = respond(self.stage, number)
        self.enter(stage if self._parent == STDIN else min(stage, Stage.STOPPING))
        if self.stage == Stage.ABORTED:
            os._exit(128 + number)
        if self._broker is None:  # later it would be raised inside a loop that starts or closes
            raise mark(SystemExit(0), number)

    def enter(self, stage: Stage) -> None:
        """Enter a stage, unless this or a later one is reached."""
        if stage <= self.stage:
            return
        self.stage = stage
        if stage >= Stage.STOPPING and self._broker is not None:
            self._guard(self._broker)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._act, stage)

    def serve(self, broker: Broker, around: Lifespan = contextlib.nullcontext) -> None:
        """Run an event loop until the broker has stopped, inside of `around`.

        An exit that the code of a user raises outside of a handler's call, such as in a task that a handler has
        started, ends the loop. It is a failure, with the exit code of one.
        """
        self._broker = broker
        try:
            anyio.run(self._run, broker, around, backend_options={"use_uvloop": find_spec("uvloop") is not None})
        except (SystemExit, KeyboardInterrupt) as error:
            if self.stage > Stage.RUNNING:
                raise
            log.error("code outside of a handler's call ended this worker: %s", describe(error), exc_info=error)
            raise SystemExit(1) from None

    async def _run(self, broker: Broker, around: Lifespan) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            with anyio.CancelScope() as self._scope:
                if self.stage == Stage.RUNNING:
                    async with around():
                        serving = self._serving
                        await broker.run(
                            only=serving.only, concurrency=serving.concurrency, max_messages=serving.max_messages
                        )
        finally:
            self._loop = None

    def _act(self, stage: Stage) -> None:
        log.info("%s", stage.name.lower())
        broker, scope = self._broker, self._scope
        assert broker is not None
        if broker.worker is None:  # not connected yet, or not any more: nothing to hand back
            if scope is not None:
                scope.cancel()
        elif stage == Stage.QUIET:
            broker.quiet()
        else:
            broker.stop(timedelta(0) if stage == Stage.ENDING else self._grace)

    def tell_parent(self, word: bytes) -> None:
        """Tell the parent process, which may have ended."""
        with contextlib.suppress(OSError):
            os.write(self._parent, word + b"\n")

    def watch_parent(self) -> None:
        """Tell the parent that this process is ready, and stop gracefully when the parent ends."""
        parent = os.dup(STDIN)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, STDIN)  # processes that handlers start must not read from the parent
        os.close(nothing)
        self._parent = parent
        self.tell_parent(READY)
        threading.Thread(target=self._await_end, args=(parent,), name="rsmq-parent", daemon=True).start()

    @asynccontextmanager
    async def introducing(self) -> AsyncIterator[None]:
        """A lifespan of the broker: tell the parent which member this process is, before it takes any partition."""
        if self._broker is not None and self._broker.worker is not None:
            self._worker = self._broker.worker
            self.tell_parent(b"%b %b" % (MEMBER, self._worker.member.encode()))
        yield

    @property
    def last_word(self) -> bytes:
        """What its parent hears at an orderly end."""
        is_exhausted = self._worker is not None and self._worker.is_exhausted
        return EXHAUSTED if is_exhausted and self.stage == Stage.RUNNING else FINISHED

    def _await_end(self, parent: int) -> None:
        with contextlib.suppress(OSError):
            rest = b""
            while data := os.read(parent, 4096):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._hear(line)
        if self.stage < Stage.STOPPING:
            log.warning("the parent process has ended: stopping")
            self.enter(Stage.STOPPING)

    def _hear(self, line: bytes) -> None:
        """Act on a line of the parent process, in the thread that reads it."""
        if line == END_NOW:
            self.enter(Stage.ENDING)
        word, _, member = line.partition(b" ")
        loop = self._loop
        if word == ENDED and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._member_ended, member.decode())

    def _member_ended(self, member: str) -> None:
        if self._broker is not None and self._broker.worker is not None:
            self._broker.worker.member_ended(member)

    def _guard(self, broker: Broker) -> None:
        """Start a timer that ends the process if nothing else does."""
        grace = broker.settings.stop_grace if self._grace is None else self._grace
        seconds = (grace + broker.settings.lease_ttl).total_seconds() + SLACK
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._give_up)
        timer.daemon = True
        timer.start()

    def _give_up(self) -> None:
        log.error("a handler does not stop: the process exits without it, and its message is redelivered")
        leave(128 + signal.SIGKILL)


@asynccontextmanager
async def ending_at_signals() -> AsyncIterator[None]:
    """End the block, in order, at SIGTERM, Ctrl-C or SIGHUP, unless SIGHUP is ignored, as by `nohup`."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    with anyio.open_signal_receiver(*numbers) as received:
        async with anyio.create_task_group() as tasks:

            async def end() -> None:
                async for _ in received:
                    tasks.cancel_scope.cancel()

            tasks.start_soon(end)
            yield
            tasks.cancel_scope.cancel()


def python_rsmq() -> tuple[str, ...]:
    """The command `rsmq` for a child process. It does not look for modules in the current directory first, unless rsmq
    itself lies there: an application may have a module `redis` or `queue`, which the command would find in place of the
    package of this name."""
    alone = () if Path(__file__).parents[2] == current_directory() else ("-P",)
    return (sys.executable, *alone, "-m", "rsmq")


def leave(code: int) -> None:
    """End the process without waiting for threads: those that still run are handlers that did not stop."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def has_stuck_threads() -> bool:
    """Whether a thread would keep this process from ending."""
    return any(not each.daemon and each is not threading.main_thread() for each in threading.enumerate())
