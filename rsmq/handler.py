"""A handler as the worker sees it: validated once when it is registered, so that nothing is decided per message.

What its signature asks for becomes a decoder and a call; what a batch handler returns becomes one outcome a message.
No I/O, and nothing here knows when or where a handler runs.
"""

from __future__ import annotations

import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, get_args

from rsmq.clock import epoch_ms
from rsmq.dependency import with_dependencies
from rsmq.errors import ConfigError
from rsmq.keys import check_name
from rsmq.message import Message
from rsmq.payload import Decoder, decode_nothing, decoder_for
from rsmq.rate import Rate
from rsmq.retry import RetryPolicy
from rsmq.signature import Signature, read_signature

Ordering = Literal["key", "partition", "none"]
Distribution = Literal["hash", "shared"]
Execution = Literal["inline", "thread", "process"]
Outcome = BaseException | None
Call = Callable[[Any], Awaitable[Any]]
Middleware = Callable[[Any, Call], Awaitable[Any]]
"""`async def middleware(message, call_next)`: the message (for a batch handler the list of them) and what to await."""

STREAM_ID: Final = re.compile(r"\d{1,20}(-\d{1,20})?")
MOST_PARTITIONS: Final = 1024


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
    if linger is not None and batch is None:
        raise ConfigError(f"handler {title}: linger needs batch, such as batch=500: single messages never wait")
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise ConfigError(f"handler {title}: retry={retry!r} is no policy: write retry=RetryPolicy(max_attempts=5)")
    return Handler(
        function=function,
        name=title,
        topic=check_name("topic", topic),
        group=check_name("group", group),
        concurrency=_count(title, "concurrency", concurrency),
        ordering=_ordering(title, ordering, distribution),
        distribution=_one_of(title, "distribution", distribution, Distribution),
        retry=RetryPolicy() if retry is None else retry,
        timeout=_timeout(title, timeout),
        batch=None if batch is None else _count(title, "batch", batch),
        linger=timedelta(0) if linger is None else _linger(title, linger),
        start=_start(title, start),
        partitions=None if partitions is None else _count(title, "partitions", partitions, MOST_PARTITIONS),
        execution=_execution(
            function, title, execution, is_async=signature.is_async, has_dependencies=called is not function
        ),
        rate=None if rate is None else _rate(title, rate, is_batch=batch is not None),
        group_concurrency=None if group_concurrency is None else _whole(title, group_concurrency, distribution),
        signature=signature,
        decode=decoder_for(signature.payload) if signature.has_payload else decode_nothing,
        invoke=_refuse_shape if batch is not None else signature.single_call(),
        invoke_batch=_refuse_shape if batch is None else signature.batch_call(),
    )


def _refuse_shape(_work: Any) -> Any:
    """Stands where the other of `invoke` and `invoke_batch` does not fit."""
    raise TypeError("a batch handler has invoke_batch only, any other invoke only")


# -- the options


def _one_of(title: str, option: str, value: Any, choices: Any) -> Any:
    if value not in get_args(choices):
        known = " or ".join(repr(choice) for choice in get_args(choices))
        raise ConfigError(f"handler {title}: {option}={value!r} is unknown: use {known}")
    return value


def _count(title: str, option: str, value: Any, most: int | None = None) -> int:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or value < 1 or (most is not None and value > most):
        limit = "of 1 or more" if most is None else f"from 1 to {most}"
        raise ConfigError(f"handler {title}: {option}={value!r} is not a whole number {limit}")
    return int(value)


def _ordering(title: str, ordering: Any, distribution: Distribution) -> Ordering:
    if ordering is None:
        return "key" if distribution == "hash" else "none"
    if ordering in ("key", "partition") and distribution == "shared":
        raise ConfigError(
            f"handler {title}: distribution='shared' has no order, so ordering={ordering!r} cannot hold: leave one of "
            f"them out"
        )
    chosen: Ordering = _one_of(title, "ordering", ordering, Ordering)
    return chosen


def _timeout(title: str, timeout: Any) -> timedelta | None:
    if isinstance(timeout, int | float) and not isinstance(timeout, bool) and 0 < timeout < math.inf:
        timeout = timedelta(seconds=min(timeout, 10**9))
    if timeout is None or (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        return timeout
    raise ConfigError(f"handler {title}: timeout={timeout!r} is no time above 0: write timeout=timedelta(seconds=30)")


def _linger(title: str, linger: Any) -> timedelta:
    if isinstance(linger, timedelta) and linger >= timedelta(0):
        return linger
    raise ConfigError(f"handler {title}: linger={linger!r} is not a time: write linger=timedelta(milliseconds=50)")


def _start(title: str, start: Any) -> str | datetime:
    if isinstance(start, datetime):
        epoch_ms(start)
        return start
    if isinstance(start, str) and (start in ("earliest", "latest") or STREAM_ID.fullmatch(start)):
        return start
    raise ConfigError(
        f"handler {title}: start={start!r} is no place in a topic: use 'earliest', 'latest', a stream id such as "
        f"'1700000000000-0' or an aware datetime"
    )


def _rate(title: str, rate: Any, *, is_batch: bool) -> Rate:
    if not isinstance(rate, Rate):
        raise ConfigError(f"handler {title}: rate={rate!r} is no rate: write rate=Rate(100, per=timedelta(seconds=1))")
    if is_batch:
        raise ConfigError(f"handler {title}: rate counts single messages: leave batch out, or use concurrency")
    return rate


def _whole(title: str, calls: Any, distribution: Distribution) -> int:
    """The limit over the whole group: it goes by who owns what."""
    if distribution == "shared":
        raise ConfigError(
            f"handler {title}: under distribution='shared' a limit over the group cannot hold: leave group_concurrency "
            f"out, or let partitions have owners with distribution='hash'"
        )
    return _count(title, "group_concurrency", calls)


def _execution(
    function: Any, title: str, execution: Any, *, is_async: bool, has_dependencies: bool = False
) -> Execution:
    if execution is None:
        return "inline" if is_async else "thread"
    chosen: Execution = _one_of(title, "execution", execution, Execution)
    if is_async != (chosen == "inline"):
        kind, other = ("an async def", "a plain def") if is_async else ("a plain def", "async def")
        raise ConfigError(
            f"handler {title}: {kind} cannot run with execution={execution!r}: write {other}, or leave it out"
        )
    if chosen == "process" and has_dependencies:
        raise ConfigError(f"handler {title}: dependencies cannot go to another process: open them in the function")
    if chosen == "process" and not (inspect.isfunction(function) and "<" not in function.__qualname__):
        raise ConfigError(
            f"handler {title}: execution='process' needs a function that another process can import by name: define it "
            f"with def at module level"
        )
    return chosen


# -- batches


def batch_outcomes(result: Any, messages: Sequence[Message]) -> list[Outcome]:
    """One outcome a message from what a batch handler returned: None for done, else the error. Never raises.

    The handler returns nothing (all done), or a list with one entry a message: None, Retry(...), Reject(...) or any
    other exception. Everything else is a TypeError for each of them, because nobody can tell what was done.
    """
    if result is None:
        return [None] * len(messages)
    if not isinstance(result, list | tuple):
        wrong = f"it returned {type(result).__name__}"
    elif len(result) != len(messages):
        wrong = f"it returned {len(result)} outcomes for {len(messages)} messages"
    else:
        strange = next((each for each in result if each is not None and not isinstance(each, Exception)), None)
        if strange is None:
            return list(result)
        wrong = f"one outcome is {type(strange).__name__}"
    error = TypeError(
        f"{wrong}: a batch handler returns None (all done) or a list with one entry a message: "
        f"None, Retry(...), Reject(...) or an exception"
    )
    return [error] * len(messages)


# -- middleware


def compose(middlewares: Sequence[Middleware], innermost: Call) -> Call:
    """One call through all of them, the first outermost. Without middleware it is `innermost` itself."""
    for middleware in reversed(middlewares):
        innermost = _around(middleware, innermost)
    return innermost


class Wrapping(ABC):
    """A middleware that makes the call around the next one itself, once: it can leave out what most messages need not.

    What it makes may have an attribute `plain`: see `plain_call`.
    """

    @abstractmethod
    def wrap(self, call_next: Call) -> Call:
        """The call around the next one."""

    def __call__(self, work: Any, call_next: Call) -> Awaitable[Any]:
        """As any other middleware."""
        return self.wrap(call_next)(work)


def plain_call(call: Call) -> Call:
    """What a call does for plain messages: itself, or what it leaves them to."""
    inner: Call = getattr(call, "plain", call)
    return inner


def _around(middleware: Middleware, call_next: Call) -> Call:
    return middleware.wrap(call_next) if isinstance(middleware, Wrapping) else lambda work: middleware(work, call_next)
