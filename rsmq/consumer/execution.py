"""How a handler runs: in the loop, in a thread, or in a process of its own; message by message or in batches.

Decided once, not per message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import anyio.to_process
import anyio.to_thread

from rsmq.consumer.batch_runner import BatchRunner
from rsmq.consumer.queue import Queue
from rsmq.consumer.runner import Runner
from rsmq.consumer.settler import Settler
from rsmq.consumer.stretch_runner import StretchRunner, asks_payloads_only
from rsmq.handler import Handler
from rsmq.middleware import Call, Middleware, compose


def build_call(handler: Handler, middlewares: Sequence[Middleware]) -> Call:
    """The one coroutine function that a runner awaits for a message (or for a batch)."""
    innermost = {"inline": _inline, "thread": _in_thread, "process": _in_process}[handler.execution](handler)
    return compose((*middlewares, *handler.around), innermost)


def build_runner(handler: Handler, call: Call, queue: Queue, settler: Settler, stats: Counter[str]) -> Runner:
    """The runner that awaits it."""
    if handler.batch is None:
        return Runner(handler, call, queue, settler, stats)
    # under a limit over the group who takes a stretch would have to hold a place
    is_plain = asks_payloads_only(handler, call) and handler.group_concurrency is None
    kind = StretchRunner if is_plain else BatchRunner
    return kind(handler, call, queue, settler, stats)


def _inline(handler: Handler) -> Call:
    return handler.invoke if handler.batch is None else handler.invoke_batch


def _in_thread(handler: Handler) -> Call:
    """A thread that is cancelled is abandoned: nothing can stop it, but nobody waits for it either."""
    function = handler.invoke if handler.batch is None else handler.invoke_batch
    limiter = anyio.CapacityLimiter(handler.concurrency)

    async def call(work: Any) -> Any:
        return await anyio.to_thread.run_sync(function, work, limiter=limiter, abandon_on_cancel=True)

    return call


def _in_process(handler: Handler) -> Call:
    """For code that holds the interpreter lock or may crash: a time-out kills the process, a crash is a failure."""
    limiter = anyio.CapacityLimiter(handler.concurrency)

    async def call(work: Any) -> Any:
        arguments = handler.arguments(work)
        return await anyio.to_process.run_sync(handler.function, *arguments, cancellable=True, limiter=limiter)

    return call
