"""One broker served in this process: what signals, the parent's end and the grace do to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from datetime import timedelta
from importlib.util import find_spec
from typing import Final

import anyio

from rsmq.broker import Broker
from rsmq.supervisor import Stage, respond
from rsmq.worker import Lifespan

log = logging.getLogger("rsmq.worker")

STDIN: Final = 0
SLACK: Final = 15.0
"""Seconds beyond grace and lease that an orderly end may take (replies, goodbyes)."""


class Service:
    """Obeys signals for one process. Before a broker is served a signal simply ends it; when it has been, none does.

    Invariant: whatever the handlers do (block the loop, ignore cancellation), the process ends within the grace and a
    lease once it was told to stop.
    """

    def __init__(self, grace: timedelta | None) -> None:
        self.stage = Stage.RUNNING
        self._grace = grace
        self._broker: Broker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scope: anyio.CancelScope | None = None

    def obey(self, number: int) -> None:
        """A signal has arrived; called in the main thread, perhaps in the middle of a handler that blocks the loop."""
        self.enter(respond(self.stage, number))
        if self.stage == Stage.ABORTED:
            os._exit(128 + number)
        if self._broker is None:  # later it would be raised in the middle of a loop that starts or closes
            raise SystemExit(0)

    def enter(self, stage: Stage) -> None:
        """Go on to a stage, unless a later one is reached."""
        if stage <= self.stage:
            return
        self.stage = stage
        if stage >= Stage.STOPPING and self._broker is not None:
            self._guard(self._broker)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._act, stage)

    def serve(self, broker: Broker, around: Lifespan = contextlib.nullcontext) -> None:
        """Run an event loop until the broker has stopped, inside of `around`."""
        self._broker = broker
        anyio.run(self._run, broker, around, backend_options={"use_uvloop": find_spec("uvloop") is not None})

    async def _run(self, broker: Broker, around: Lifespan) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            with anyio.CancelScope() as self._scope:
                if self.stage == Stage.RUNNING:
                    async with around():
                        await broker.run()
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

    def watch_parent(self) -> None:
        """Tell the parent that we are ready, and stop gracefully when it is gone."""
        parent = os.dup(STDIN)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, STDIN)  # what handlers start must not read from the parent
        os.close(nothing)
        os.write(parent, b"1")
        threading.Thread(target=self._await_end, args=(parent,), name="rsmq-parent", daemon=True).start()

    def _await_end(self, parent: int) -> None:
        with contextlib.suppress(OSError):
            while os.read(parent, 1):
                pass
        if self.stage < Stage.STOPPING:
            log.warning("the parent is gone")
            self.enter(Stage.STOPPING)

    def _guard(self, broker: Broker) -> None:
        """A timer that ends the process when nothing else can."""
        grace = broker.settings.stop_grace if self._grace is None else self._grace
        seconds = (grace + broker.settings.lease_ttl).total_seconds() + SLACK
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._give_up)
        timer.daemon = True
        timer.start()

    def _give_up(self) -> None:
        log.error("a handler does not let go: leaving without it, its message is redelivered")
        leave(128 + signal.SIGKILL)


def leave(code: int) -> None:
    """End the process without waiting for threads: those that still run are handlers which were given up."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def has_stuck_threads() -> bool:
    """Whether a thread would keep this process from ending."""
    return any(not each.daemon and each is not threading.main_thread() for each in threading.enumerate())
