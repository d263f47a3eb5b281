"""A lifespan of a broker, and what it yields: the connections that handlers share as long as a worker runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Generic, TypeVar

from rsmq.errors import ConfigError

T = TypeVar("T")


class OpenedLifespan(Generic[T]):
    """What `broker.lifespan` makes of a function: called, it is that function; `value` is what it has yielded.

    `pool: Annotated[Pool, Depends(pool.value)]` gives it to a handler. Threads may ask for it, too; a handler with
    `execution="process"` runs in another process, which has none.
    """

    def __init__(self, function: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__doc__ = function.__doc__
        self._values: list[T] = []

    def __call__(self) -> AbstractAsyncContextManager[T]:
        """A new context, for a worker."""
        return self._open()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[T]:
        async with self.function() as value:
            self._values.append(value)
            try:
                yield value
            finally:
                self._values.pop()

    def value(self) -> T:
        """What it yielded when the worker of this process began. Raises ConfigError while none runs here."""
        if not self._values:
            raise ConfigError(
                f"lifespan {self.__name__} is not open here: its value is for handlers, in the process of a worker"
            )
        return self._values[-1]

    def __repr__(self) -> str:
        return f"<Lifespan {self.__name__}{' open' if self._values else ''}>"
