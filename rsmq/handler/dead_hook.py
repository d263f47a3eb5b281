"""The middleware of `broker.on_dead`: a function that is called with each message that becomes a dead letter."""

from __future__ import annotations

import logging
from asyncio import CancelledError, timeout
from collections.abc import Callable
from dataclasses import dataclass
from inspect import iscoroutinefunction, signature
from typing import Any, Final

import anyio.to_thread

from rsmq.errors import ConfigError, StoreUnavailable
from rsmq.handler.apart import apart
from rsmq.handler.failure import describe, exc_info
from rsmq.handler.returned import completed
from rsmq.handler.surroundings import call_surrounded
from rsmq.model.interrupt import is_from_signal
from rsmq.model.message import Message

log: Final = logging.getLogger("rsmq.handler")

LONGEST: Final = 30.0
"""Seconds that the function may take: meanwhile the message is not settled."""


@dataclass(frozen=True, slots=True)
class Burial:
    """Why a message becomes a dead letter: `reason` as in the dead letter (`failed`, `timeout`, ...), the `error` as
    text, and how often an attempt was started."""

    reason: str
    error: str
    attempts: int


DeadFunction = Callable[[Message, Burial], Any]


def check_function(function: Any) -> None:
    """Raise ConfigError for what cannot be called with a message and a burial."""
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"{function!r} is not a function: write `async def fallback(message, burial)`")
    try:
        signature(function).bind(None, None)
    except TypeError:
        raise ConfigError(
            f"{function!r} does not take (message, burial): write `async def fallback(message, burial)`"
        ) from None


async def _call(function: DeadFunction, message: Message, burial: Burial) -> None:
    if iscoroutinefunction(function):
        await completed(await function(message, burial))
    else:
        await completed(
            await anyio.to_thread.run_sync(call_surrounded, function, message, burial, abandon_on_cancel=True)
        )


async def call_hook(function: DeadFunction, message: Message, burial: Burial) -> bool:
    """Call it; a plain function runs in a thread. False: it failed, which is logged and keeps no message alive. Raises
    StoreUnavailable where what it publishes could not be put: then it is to be called again."""
    try:
        async with timeout(LONGEST):
            await apart(_call, function, message, burial)
    except BaseException as problem:
        if isinstance(problem, CancelledError | StoreUnavailable) or is_from_signal(problem):
            raise
        log.error(
            "on_dead failed, so %s becomes a dead letter without its outputs: %s", message, describe(problem),
            exc_info=exc_info(problem),
        )  # fmt: skip
        return False
    return True
