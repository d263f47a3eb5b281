"""Turns coroutine methods into blocking ones, for code without an event loop. Names, types and texts stay theirs."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

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


class BlockingContext(Blocking):
    """What `with` opens: the connection of a broker, and in it what `make` makes of that broker."""

    def __init__(self, portal: Portal, make: Callable[[Any], AbstractAsyncContextManager[Any]]) -> None:
        super().__init__(portal, self._made)
        self._make = make
        self._target: AbstractAsyncContextManager[Any] | None = None

    def _made(self, broker: Any) -> AbstractAsyncContextManager[Any]:
        if self._target is None:
            self._target = self._make(broker)
        return self._target

    def __enter__(self) -> Self:
        self._portal.enter()  # what is opened ends with its connection
        try:
            self._call(lambda target: target.__aenter__())
        except BaseException:
            self._portal.leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._call(lambda target: target.__aexit__(kind, error, at))
        finally:
            self._portal.leave()


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
