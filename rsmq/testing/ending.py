"""How a block of a test ends: with the test's own error, not with a group around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from types import TracebackType


async def end(
    stack: AsyncExitStack, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
) -> bool | None:
    """Leave `stack`. Task groups wrap what passes through them: the test's error alone comes out as it was."""
    try:
        return await stack.__aexit__(kind, error, at)
    except BaseExceptionGroup as group:
        if error is not None and all(leaf is error for leaf in leaves(group)):
            return False  # goes on as it is
        raise


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The errors in a group and its groups."""
    for each in group.exceptions:
        if isinstance(each, BaseExceptionGroup):
            yield from leaves(each)
        else:
            yield each
