"""How a handler runs: in the loop, in a thread or in a process; by message or by batch. Decided once, at the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import anyio
import anyio.to_thread

from rsmq.consumer.running.batch_runner import BatchRunner
from rsmq.consumer.running.gathered_runner import GatheredRunner
from rsmq.consumer.running.process_pool import ProcessPool
from rsmq.consumer.running.runner import Runner
from rsmq.consumer.settling.settler import Settler
from rsmq.consumer.waiting.queue import Queue
from rsmq.consumer.waiting.start_times import StartTimes
from rsmq.errors import RsmqError
from rsmq.handler.error_hook import ErrorHook
from rsmq.handler.handler import Handler
from rsmq.handler.middleware import Call, Middleware, Wrapping, compose
from rsmq.handler.reader import PayloadReader
from rsmq.handler.returned import completed
from rsmq.handler.surroundings import call_surrounded, surrounded
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.message import Message
from rsmq.model.settings import Settings


def build_call(handler: Handler, middlewares: Sequence[Middleware], processes: ProcessPool | None = None) -> Call:
    """What a runner awaits for a message or a batch: the handler's function inside its middlewares."""
    if processes is not None:
        innermost = _in_process(handler, processes)
    else:
        innermost = (_in_thread if handler.execution == "thread" else _inline)(handler)
    if handler.outputs:
        innermost = (_publishing_each if handler.batch else _publishing)(innermost, handler.outputs)
    elif not all(isinstance(each, Wrapping) for each in (*middlewares, *handler.around)):
        innermost = _completing(innermost)
    return compose((*middlewares, *handler.around), innermost)


def build_runner(
    handler: Handler,
    middlewares: Sequence[Middleware],
    queue: Queue,
    settler: Settler,
    stats: Counter[str],
    encoding: Encoding = NO_CODECS,
    patience: timedelta = Settings.key_patience,
    times: StartTimes | None = None,
) -> Runner:
    """The runner for a handler. A message that cannot be decoded yet waits for `patience`. `times`: its rule for when
    messages may start."""
    processes = ProcessPool(handler.concurrency) if handler.execution == "process" else None
    payload_call, call = build_payload_call(handler, middlewares), build_call(handler, middlewares, processes)
    if times is not None:
        call = times.guard(call)
    kind = Runner if handler.batch is None else BatchRunner if handler.by is None else GatheredRunner
    hooks = [each for each in (*middlewares, *handler.around) if isinstance(each, ErrorHook)]
    reader = PayloadReader(handler.decode, encoding, handler.formats)
    runner = kind(handler, call, queue, settler, stats, payload_call, hooks, reader, patience)
    if processes is not None:
        runner.end_with(processes.close)
    return runner


def build_payload_call(handler: Handler, middlewares: Sequence[Middleware]) -> Call | None:
    """What a runner calls with payloads only. None: the function or a middleware must see the messages."""
    if handler.execution != "inline" or handler.outputs or handler.tenants is not None or handler.when is not None:
        return None  # an output belongs to a message; a tenant, and when it may start, is a function of it
    if handler.counts_messages or handler.by is not None:
        return None  # and so does a permit, a failure, a cost or a call by key
    call = handler.signature.payload_call()
    call = None if call is None else surrounded(call)
    for middleware in reversed((*middlewares, *handler.around)):
        if call is None or not isinstance(middleware, Wrapping):
            return None
        wrap = middleware.wrap_payload if handler.batch is None else middleware.wrap_payloads
        call = wrap(call, handler.topic, handler.group)
    return call


def _inline(handler: Handler) -> Call:
    return surrounded(handler.invoke if handler.batch is None else handler.invoke_batch)


def _completing(call: Call) -> Call:
    """A call inside middlewares of the user has come to its end: they see an error that the handler returns raised, and
    no coroutine in the place of a result."""

    async def completing(work: Any) -> Any:
        return await completed(await call(work))

    return completing


def _publishing(call: Call, topics: Sequence[str]) -> Call:
    """Publish what the call returns, as an output of its message for each topic."""

    async def publishing(message: Message) -> Any:
        result = await completed(await call(message))
        for topic in topics if result is not None else ():
            await message.publish(topic, result, key=message.key)
        return result

    return publishing


def _publishing_each(call: Call, topics: Sequence[str]) -> Call:
    """The same for each item of a batch. Returns the outcomes."""

    async def publishing(messages: Sequence[Message]) -> Any:
        results = await completed(await call(messages))
        if not isinstance(results, list | tuple) or len(results) != len(messages):
            return results  # None, or what is no list of outcomes
        outcomes = list[BaseException | None]()
        for message, result in zip(messages, results, strict=True):
            outcome = result if isinstance(result, BaseException) else None
            if result is not None and outcome is None:
                try:
                    for topic in topics:
                        await message.publish(topic, result, key=message.key)
                except RsmqError as error:
                    outcome = error
            outcomes.append(outcome)
        return outcomes

    return publishing


def _in_thread(handler: Handler) -> Call:
    """A thread cannot be stopped: when the call is cancelled, the thread runs on and its result is dropped."""
    function = handler.invoke if handler.batch is None else handler.invoke_batch
    limiter = anyio.CapacityLimiter(handler.concurrency)

    async def call(work: Any) -> Any:
        return await completed(
            await anyio.to_thread.run_sync(call_surrounded, function, work, limiter=limiter, abandon_on_cancel=True)
        )

    return call


def _in_process(handler: Handler, processes: ProcessPool) -> Call:
    """For code that holds the interpreter lock or may crash. A time-out kills the process; a crash is a failure."""

    async def call(work: Any) -> Any:
        return await processes.run(handler.function, *handler.signature.arguments(work))

    return call
