"""Running the first step of a coroutine by hand: until it suspends, no other code runs, so nothing need be recorded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import CoroutineType
from typing import Any


class Continuation:
    """The rest of a coroutine whose first step was run by hand, and which waits for something."""

    __slots__ = ("_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], waits_for: Any) -> None:
        self._coroutine, self._waits_for = coroutine, waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, waits_for = self._coroutine, self._waits_for
        try:
            while True:
                try:
                    answer = yield waits_for
                except GeneratorExit:
                    coroutine.close()
                    raise
                except BaseException as error:
                    waits_for = coroutine.throw(error)
                else:
                    waits_for = coroutine.send(answer)
        except StopIteration as end:
            return end.value


class Returned:
    """A coroutine that returned something in its first step."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.value
        yield


async def raised(error: BaseException) -> Any:
    """A coroutine that raised in its first step."""
    raise error


def first_step(function: Callable[[Any], Any], argument: Any) -> Awaitable[Any] | None:
    """Call an async function and run it until it suspends. Returns the rest; None: it has returned None."""
    try:
        work = function(argument)
    except BaseException as error:
        return raised(error)
    if type(work) is not CoroutineType:
        return work  # type: ignore[no-any-return]
    try:
        return Continuation(work, work.send(None))
    except StopIteration as end:
        return None if end.value is None else Returned(end.value)
    except BaseException as error:
        return raised(error)
