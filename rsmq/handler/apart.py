"""Calling a function of the user apart from the task that calls it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rsmq.handler.failure import describe
from rsmq.model.interrupt import is_from_signal

T = TypeVar("T")


async def apart(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Call an async function in a task of its own.

    What it sets in context variables ends with it. A cancellation or a SystemExit in it is an error of the function, a
    RuntimeError here, and ends no more than its own task.
    """
    task = asyncio.create_task(_outcome_of(function, arguments))
    try:
        await asyncio.wait((task,))
    finally:
        task.cancel()
    result, error = task.result()
    if error is not None:
        raise error if isinstance(error, Exception) else RuntimeError(describe(error)) from error
    return result  # type: ignore[return-value]


async def _outcome_of(
    function: Callable[..., Awaitable[T]], arguments: tuple[Any, ...]
) -> tuple[T | None, BaseException | None]:
    try:
        return await function(*arguments), None
    except BaseException as error:
        if is_from_signal(error):
            raise
        return None, error
