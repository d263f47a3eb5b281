"""Middleware wraps the calls of a handler. It is composed when the worker starts, not per message."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from rsmq.model.message import Message

Call = Callable[[Any], Awaitable[Any]]
"""Handles a message; in a batch handler, a list of messages."""
Middleware = Callable[[Any, Call], Awaitable[Any]]
"""`async def middleware(message, call_next)`: `message` is a list in a batch handler; await `call_next(message)`."""


def compose(middlewares: Sequence[Middleware], innermost: Call) -> Call:
    """One call through all of them, the first outermost. Without middleware returns `innermost` itself."""
    for middleware in reversed(middlewares):
        innermost = _around(middleware, innermost)
    return innermost


class Payloads(list[Any]):
    """The payloads of a batch in which some messages are not plain: those are `messages`."""

    def __init__(self, payloads: Iterable[Any], messages: Sequence[Message]) -> None:
        super().__init__(payloads)
        self.messages = messages


class Wrapping(ABC):
    """A middleware that builds its call around the next one when composed, so it can skip work for most messages."""

    @abstractmethod
    def wrap(self, call_next: Call) -> Call:
        """Build the call around the next one."""

    def wrap_payload(self, call_next: Call, topic: str, group: str) -> Call | None:
        """Build the call around one that gets only payloads, of plain messages. None: it must see the messages."""
        return None

    def wrap_payloads(self, call_next: Call, topic: str, group: str) -> Call | None:
        """Build the call around one that gets the payloads of a batch.

        They are a list, or `Payloads` if there are messages among them that are not plain.
        """
        return self.wrap_payload(call_next, topic, group)

    def __call__(self, work: Any, call_next: Call) -> Awaitable[Any]:
        """Run like any other middleware."""
        return self.wrap(call_next)(work)


def _around(middleware: Middleware, call_next: Call) -> Call:
    return middleware.wrap(call_next) if isinstance(middleware, Wrapping) else lambda work: middleware(work, call_next)
