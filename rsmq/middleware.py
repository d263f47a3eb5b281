"""Middleware: what surrounds a handler, and how one call is made through all of it. Composed once, not per message."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

Call = Callable[[Any], Awaitable[Any]]
"""What is awaited for a message; for a batch handler, for the list of them."""
Middleware = Callable[[Any, Call], Awaitable[Any]]
"""`async def middleware(message, call_next)`: the message (for a batch handler the list of them) and what to await."""


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
