"""The pulse of an event loop: how late it is, and, while it is blocked, what blocks it.

A thread asks the loop a few times a second. Only when the answer is late does it look at the stack.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Final

import anyio
import anyio.abc

from rsmq.clock import monotonic
from rsmq.heartbeat.vitals import Vitals
from rsmq.telemetry.histogram import Histogram

log = logging.getLogger("rsmq.pulse")

TICK: Final = 0.25
LATE: Final = 1.0
"""Seconds after which an answer that is missing counts as a block, is logged and makes a worker unready."""
DEEPEST: Final = 60
LOOP_FRAMES: Final = ("_run", "_run_once", "run_forever", "run_until_complete", "_run_coro")
BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class Block:
    """What held up the loop when it was last looked at. `culprit` is for people, the stack is innermost last."""

    seconds: float
    culprit: str
    stack: tuple[str, ...]


Blame = Callable[["asyncio.Task[object] | None", list[FrameType]], str]
"""Who is to blame, from the loop's current task and its frames, innermost first; called in the thread."""


class Pulse:
    """Asks, and watches the answers. `late` is right also while the loop is blocked, from any thread.

    Code that holds the interpreter lock for long stops the thread, too: nothing in this process can see that.
    """

    def __init__(self, blame: Blame) -> None:
        self.lag = Histogram(BOUNDS)
        self._blame = blame
        self._vitals = Vitals(self.lag.observe)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._ending = threading.Event()

    @property
    def late(self) -> float:
        """Seconds for which the loop has not answered; 0 if it is not asked just now."""
        return self._vitals.waited(monotonic())

    def look(self) -> Block | None:
        """What blocks the loop now; None while nothing does."""
        late = self.late
        return self._look(late) if late >= LATE else None

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Ask until cancelled."""
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._vitals = Vitals(self.lag.observe)
        self._ending.clear()
        watcher = threading.Thread(target=self._watch, args=(self._loop,), name="rsmq-pulse", daemon=True)
        watcher.start()
        task_status.started()
        try:
            await anyio.sleep_forever()
        finally:
            self._ending.set()
            watcher.join(1)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        longest = 0.0
        while not self._ending.wait(TICK):
            with suppress(RuntimeError):  # closed meanwhile
                self._vitals.ask(loop, monotonic())
            block = self.look()
            if block is not None:
                if not longest:
                    log.warning("the event loop is blocked by %s\n%s", block.culprit, "".join(block.stack))
                longest = block.seconds
            elif longest:
                log.warning("the event loop was blocked for at least %.1f s", longest)
                longest = 0.0

    def _look(self, late: float) -> Block:
        """The stack of the loop's thread now. It may go on meanwhile: then the next look is right."""
        frame = sys._current_frames().get(self._thread_id)
        frames = list(climb(frame))
        try:
            task = asyncio.current_task(self._loop)
            culprit = self._blame(task, frames)
        except RuntimeError:
            culprit = "nobody: it has just gone on"
        shown = reversed(within_loop(frames))
        stack = traceback.StackSummary.extract(((each, each.f_lineno) for each in shown), limit=-DEEPEST)
        return Block(late, culprit, tuple(stack.format()))

    def __repr__(self) -> str:
        return f"<Pulse {self.late:.3f} s late>"


def within_loop(frames: list[FrameType]) -> list[FrameType]:
    """The frames inside of the loop's step: how the loop itself was started says nothing."""
    for at, frame in enumerate(frames):
        if at and frame.f_code.co_name in LOOP_FRAMES:
            return frames[:at]
    return frames


def climb(frame: FrameType | None) -> list[FrameType]:
    """A frame and its callers, innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames
