"""Tasks of context managers that users enter: an error comes out as itself, not as a group of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol

import anyio
import anyio.abc

SERVED_BY: Final = "rsmq-beside"
"""The name of the task of a `Beside`."""


class Startable(Protocol):
    """A function that says when it has started, as `anyio.TaskGroup.start` wants it."""

    def __call__(self, *, task_status: anyio.abc.TaskStatus[None]) -> Coroutine[Any, Any, None]: ...


class Beside:
    """`async with Beside(function, stop):` runs a function beside the block, in a task of its own.

    The block may end in another task than the one in which it began, where a task group may not: a fixture of
    pytest-asyncio does that, and so do frameworks that call one function at the start and one at the end. It begins
    when the function has said that it started. At its end `stop` is called (without one the function is cancelled), and
    the function is waited for, also by a block that is being cancelled.

    When the function fails earlier, the task in which the block began is cancelled, and its error is raised.
    """

    def __init__(self, function: Startable, stop: Callable[[], object] | None = None) -> None:
        self._function = function
        self._scope = anyio.CancelScope()
        self._stop = self._scope.cancel if stop is None else stop
        self._began_in: asyncio.Task[Any] | None = None
        self._has_cancelled = False
        self._is_ending = False

    async def __aenter__(self) -> None:
        self._began_in = asyncio.current_task()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._run(started), name=SERVED_BY)
        try:
            await asyncio.wait((self.task, started), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            self._is_ending = True
            self._scope.cancel()
            await self._ended()
            raise
        if not started.done():
            self._is_ending = True
            await self.task
            raise RuntimeError(f"{self._function} ended before it said that it started")
        self.task.add_done_callback(self._ends_block)

    async def _run(self, started: asyncio.Future[None]) -> None:
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    await tasks.start(self._function)
                    started.set_result(None)
        except BaseExceptionGroup as group:
            raise_only(group)

    def _ends_block(self, task: asyncio.Task[Any]) -> None:
        """The function has failed: what the block does is in vain."""
        host = self._began_in
        if not self._is_ending and host is not None and (task.cancelled() or task.exception() is not None):
            self._has_cancelled = host.cancel()

    async def _ended(self) -> None:
        with anyio.CancelScope(shield=True):
            await asyncio.wait((self.task,))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._is_ending = True
        self._stop()
        await self._ended()
        failure = None if self.task.cancelled() else self.task.exception()
        if self._has_cancelled and (host := asyncio.current_task()) is self._began_in and host is not None:
            others = host.uncancel()
            if not others and isinstance(error, asyncio.CancelledError):
                error = None
        if failure is None:
            return
        if error is None or isinstance(error, asyncio.CancelledError):
            raise failure
        raise BaseExceptionGroup("the block and what runs beside it", [error, failure])


@asynccontextmanager
async def own_tasks() -> AsyncIterator[anyio.abc.TaskGroup]:
    """A task group around the block of a user. A group that the block itself raises stays one."""
    own: BaseException | None = None
    try:
        async with anyio.create_task_group() as tasks:
            try:
                yield tasks
            except BaseException as error:
                own = error
                raise
    except BaseExceptionGroup as group:
        raise_only(group, own)


def raise_only(group: BaseException, own: BaseException | None = None) -> NoReturn:
    """Raise the one error in groups of groups. Several errors stay a group, and so does `own`."""
    error = group
    while isinstance(error, BaseExceptionGroup) and error is not own and len(error.exceptions) == 1:
        error = error.exceptions[0]
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context  # and not the group
