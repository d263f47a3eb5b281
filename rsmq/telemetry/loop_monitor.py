"""Loop lag of an event loop and, while it is blocked, what blocks it.

A thread schedules a callback in the loop a few times a second. Only if the callback is late does it read the stack.
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

from rsmq.heartbeat.loop_lag import LoopLag
from rsmq.model.clock import awake
from rsmq.telemetry.metric import Histogram

log = logging.getLogger("rsmq.loop")

TICK: Final = 0.25
LATE: Final = 1.0
"""Seconds without an answer that count as a block: it is logged, and the worker is not ready."""
DEEPEST: Final = 60
LOOP_FRAMES: Final = ("_run", "_run_once", "run_forever", "run_until_complete", "_run_coro")
BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class LoopBlock:
    """The call that blocks the loop. `culprit` is a description for people, the stack has the innermost frame last."""

    seconds: float
    culprit: str
    stack: tuple[str, ...]


Blame = Callable[["asyncio.Task[object] | None", list[FrameType]], str]
"""Describes what blocks, from the loop's current task and its frames, innermost first. Called in the thread."""


class LoopMonitor:
    """Measures how late the loop answers. `late` can be read from any thread, also while the loop is blocked.

    `on_tick` is called in the thread, a few times a second.

    Code that holds the interpreter lock for long also stops the thread: no code in this process can notice that.
    """

    def __init__(self, blame: Blame, on_tick: Callable[[], object] = lambda: None) -> None:
        self.lag = Histogram(BOUNDS)
        self._blame, self._on_tick = blame, on_tick
        self._loop_lag = LoopLag(self.lag.observe)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._ending = threading.Event()

    @property
    def late(self) -> float:
        """Seconds since the pending callback was scheduled; 0 without one."""
        return self._loop_lag.waited(awake())

    def block(self) -> LoopBlock | None:
        """The call that blocks the loop now; None if it is not blocked."""
        late = self.late
        return self._describe(late) if late >= LATE else None

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Measure until cancelled."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._loop_lag = LoopLag(self.lag.observe)
        self._ending.clear()
        thread = threading.Thread(target=self._watch, args=(self._loop,), name="rsmq-loop-monitor", daemon=True)
        thread.start()
        task_status.started()
        try:
            await anyio.sleep_forever()
        finally:
            self._ending.set()
            thread.join(1)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        longest = 0.0
        while not self._ending.wait(TICK):
            with suppress(RuntimeError):  # closed meanwhile
                self._loop_lag.ask(loop, awake())
            self._on_tick()
            block = self.block()
            if block is not None:
                if not longest:
                    log.warning("the event loop is blocked by %s\n%s", block.culprit, "".join(block.stack))
                longest = block.seconds
            elif longest:
                log.warning("the event loop was blocked for at least %.1f s", longest)
                longest = 0.0

    def _describe(self, late: float) -> LoopBlock:
        """The stack of the loop's thread now. The loop may go on meanwhile: then the next measurement is right."""
        frame = sys._current_frames().get(self._thread_id)
        frames = [] if frame is None else [each for each, _ in traceback.walk_stack(frame)]
        try:
            culprit = self._blame(asyncio.current_task(self._loop), frames)
        except RuntimeError:
            culprit = "code that has just finished"
        shown = reversed(within_loop(frames))
        stack = traceback.StackSummary.extract(((each, each.f_lineno) for each in shown), limit=-DEEPEST)
        return LoopBlock(late, culprit, tuple(stack.format()))

    def __repr__(self) -> str:
        return f"<LoopMonitor {self.late:.3f} s late>"


def within_loop(frames: list[FrameType]) -> list[FrameType]:
    """The frames inside the loop's step, without those that started the loop."""
    for at, frame in enumerate(frames):
        if at and frame.f_code.co_name in LOOP_FRAMES:
            return frames[:at]
    return frames
