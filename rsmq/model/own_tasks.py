"""A task group for context managers that users enter: an error comes out as itself, not as a group of one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import anyio
import anyio.abc


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
