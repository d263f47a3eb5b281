"""What a function of a user returns: a coroutine that was not awaited is not taken for a result.

A decorator that forgets `functools.wraps` makes a plain function of an `async def`: its call returns a coroutine, and
without a look at it the message would be settled although its handler has never run. And who writes `return Retry()`
means what `raise Retry()` does: the message would be settled, too.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from inspect import isasyncgen, isawaitable, isgenerator
from types import AsyncGeneratorType, GeneratorType
from typing import Any


async def completed(result: Any) -> Any:
    """The result of a call: a coroutine, a task or a future is awaited. Raises an error that is returned, and TypeError
    for a generator."""
    while result is not None:
        if isawaitable(result):
            result = await result
        elif isinstance(result, Future):
            result = await asyncio.wrap_future(result)
        elif isgenerator(result) or isasyncgen(result):
            raise TypeError(
                f"{result.__qualname__} returned a generator, whose body has not run: a handler has no `yield`, and a "
                f"decorator around one awaits it"
            )
        elif isinstance(result, BaseException):
            raise result
        else:
            return result
    return None


def errors_in(result: Any) -> int:
    """How many messages of a batch have failed, by what its handler has returned."""
    return sum(isinstance(each, BaseException) for each in result) if isinstance(result, list | tuple) else 0


def is_unfinished(result: Any) -> bool:
    """Whether `completed` would await, raise or refuse it."""
    kind = type(result)
    return (
        hasattr(kind, "__await__")
        or kind in (GeneratorType, AsyncGeneratorType)
        or issubclass(kind, (Future, BaseException))
    )


def ended(result: Any, function: Any, later: str) -> Any:
    """The result of a plain function whose call has to come to its end here. Raises an error that is returned, and
    TypeError for what would run later, with what that means."""
    while isinstance(result, Future):
        result = result.result()
    if isinstance(result, BaseException):
        raise result
    if isawaitable(result) or isgenerator(result) or isasyncgen(result):
        if hasattr(result, "close"):
            result.close()
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(f"{name} returned {type(result).__name__}, {later}")
    return result


def called(function: Any, *arguments: Any) -> Any:
    """Call a plain function in another process. Raises TypeError for a result that can only be awaited here."""
    return ended(
        function(*arguments),
        function,
        'which runs in no event loop here: a handler with execution="process" is a plain function, also inside its '
        "decorators",
    )
