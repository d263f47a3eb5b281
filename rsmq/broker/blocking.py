"""Turns coroutine methods into blocking ones, for code without an event loop. Names, types and texts stay theirs."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from rsmq.broker.portal import Portal

P = ParamSpec("P")
R = TypeVar("R")

END: Final = object()


class Blocking:
    """Something of a broker that lives in the event loop of a portal. `find` takes it from the connected broker."""

    def __init__(self, portal: Portal, find: Callable[[Any], Any]) -> None:
        self._portal, self._find = portal, find

    def _call(self, action: Callable[[Any], Awaitable[Any]], *, endless: bool = False) -> Any:
        return self._portal.call(lambda broker: action(self._find(broker)), endless=endless)


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, P], R]:
    """A method that calls this one in the event loop and waits for its result."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **options: P.kwargs) -> Any:
        return self._call(lambda target: method(target, *args, **options))

    return call


def iterating(method: Callable[Concatenate[Any, P], AsyncIterator[R]]) -> Callable[Concatenate[Any, P], Iterator[R]]:
    """A method that iterates over what this one yields in the event loop."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **options: P.kwargs) -> Iterator[Any]:
        async def begin(target: Any) -> AsyncIterator[R]:
            return method(target, *args, **options)

        async def step(_: Any) -> Any:
            return await anext(items, END)

        items = self._call(begin)
        while (item := self._call(step)) is not END:
            yield item

    return call


def passed_on(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method that calls this one of the `asynchronous` broker, without its event loop."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **options: P.kwargs) -> Any:
        return method(self.asynchronous, *args, **options)

    return call
