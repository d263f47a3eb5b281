"""Error hooks report the failed attempts of handlers to other systems, such as Sentry."""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from typing import Final

from rsmq.handler.apart import apart
from rsmq.handler.failure import describe, exc_info
from rsmq.handler.middleware import Call, Wrapping
from rsmq.handler.returned import completed
from rsmq.model.interrupt import is_from_signal
from rsmq.model.message import Message

log: Final = logging.getLogger("rsmq.handler")

ErrorFunction = Callable[[Message, BaseException], object]


class ErrorHook(Wrapping):
    """A function of the user, registered among the middlewares to have their scope. It is not part of any call."""

    def __init__(self, function: ErrorFunction) -> None:
        self.function = function

    def wrap(self, call_next: Call) -> Call:
        """Nothing is wrapped: the runner reports what has failed."""
        return call_next

    def wrap_payload(self, call_next: Call, topic: str, group: str) -> Call | None:
        """Nothing is wrapped here either."""
        return call_next


async def _call(hook: ErrorHook, message: Message, error: BaseException) -> None:
    await completed(hook.function(message, error))


async def report(hooks: Sequence[ErrorHook], message: Message, error: BaseException) -> None:
    """Call every hook. What one raises is logged, and changes nothing for the message."""
    for hook in hooks:
        try:
            await apart(_call, hook, message, error)
        except BaseException as problem:
            if isinstance(problem, CancelledError) or is_from_signal(problem):
                raise
            log.error("on_error failed for %s: %s", message, describe(problem), exc_info=exc_info(problem))
