"""A handler as the worker sees it: validated once when it is registered, so that nothing is decided per message.

What its signature asks for becomes a decoder and a call. No I/O, and nothing here knows when or where a handler runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from rsmq.dependency import with_dependencies
from rsmq.keys import check_name
from rsmq.message import Message
from rsmq.middleware import Middleware
from rsmq.option import MOST_PARTITIONS, Distribution, Execution, Options, Ordering
from rsmq.payload import Decoder, decode_nothing, decoder_for
from rsmq.rate import Rate
from rsmq.retry import RetryPolicy
from rsmq.signature import Signature, read_signature


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Handler:
    """One function for one topic and group. Make it with `build_handler`, which checks every field.

    `invoke(message)` and `invoke_batch(messages)` call the function with what its signature asks for, taken from
    `message.payload` (set it with `decode`); one of the two fits, by `batch`. The result of an `async def` is to be
    awaited (`is_async`). `linger` is how long an incomplete batch waits for more; 0: not at all. `around` is middleware
    of its own, inside that of the broker.
    """

    function: Callable[..., Any]
    name: str
    topic: str
    group: str
    concurrency: int
    ordering: Ordering
    distribution: Distribution
    retry: RetryPolicy
    timeout: timedelta | None
    batch: int | None
    linger: timedelta
    start: str | datetime
    partitions: int | None
    execution: Execution
    rate: Rate | None
    group_concurrency: int | None
    signature: Signature
    decode: Decoder
    invoke: Callable[[Message], Any]
    invoke_batch: Callable[[Sequence[Message]], Any]
    around: tuple[Middleware, ...] = ()

    @property
    def is_async(self) -> bool:
        """Whether the result of a call is to be awaited."""
        return self.signature.is_async

    def arguments(self, work: Message | Sequence[Message]) -> tuple[Any, ...]:
        """What `invoke` or `invoke_batch` would pass: for a call in another process."""
        return self.signature.arguments(work)

    def __repr__(self) -> str:
        return f"<Handler {self.name} {self.topic}/{self.group}>"


def build_handler(
    function: Callable[..., Any],
    topic: str,
    *,
    group: str,
    name: str | None = None,
    concurrency: int = 64,
    ordering: Ordering | None = None,
    distribution: Distribution = "hash",
    retry: RetryPolicy | None = None,
    timeout: timedelta | float | None = None,
    batch: int | None = None,
    linger: timedelta | None = None,
    start: str | datetime = "earliest",
    partitions: int | None = None,
    execution: Execution | None = None,
    rate: Rate | None = None,
    group_concurrency: int | None = None,
) -> Handler:
    """A checked handler. Raises ConfigError that says what to write instead.

    `timeout` also takes a number: seconds, the one place where a bare number is a time. `ordering` is "key" by default
    under hash distribution, else "none"; `execution` is "inline" for an `async def`, else "thread".
    """
    title = name or getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]
    called = with_dependencies(function, title, is_batch=batch is not None)
    signature = read_signature(called, title, is_batch=batch is not None)
    options = Options(title, is_batch=batch is not None)
    return Handler(
        function=function,
        name=title,
        topic=check_name("topic", topic),
        group=check_name("group", group),
        concurrency=options.count("concurrency", concurrency),
        ordering=options.ordering(ordering, distribution),
        distribution=options.distribution(distribution),
        retry=options.retry(retry),
        timeout=options.timeout(timeout),
        batch=options.count_or_none("batch", batch),
        linger=options.linger(linger),
        start=options.start(start),
        partitions=options.count_or_none("partitions", partitions, MOST_PARTITIONS),
        execution=options.execution(
            execution, function, is_async=signature.is_async, has_dependencies=called is not function
        ),
        rate=options.rate(rate),
        group_concurrency=options.group_concurrency(group_concurrency, distribution),
        signature=signature,
        decode=decoder_for(signature.payload) if signature.has_payload else decode_nothing,
        invoke=_refuse_shape if batch is not None else signature.single_call(),
        invoke_batch=_refuse_shape if batch is None else signature.batch_call(),
    )


def _refuse_shape(_work: Any) -> Any:
    """Stands where the other of `invoke` and `invoke_batch` does not fit."""
    raise TypeError("a batch handler has invoke_batch only, any other invoke only")
