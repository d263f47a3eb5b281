"""Waiting for a state in tests with an event loop; `tests.servers.wait_until` is for those without."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isawaitable

import anyio

PATIENCE = 30.0
"""Seconds. No test is about how long something takes: this only ends one that would hang."""


async def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Wait until `condition()` is true, or what it returns to be awaited is; fail with what was waited for."""
    with anyio.move_on_after(seconds):
        while True:
            found = condition()
            if await found if isawaitable(found) else found:
                return
            await anyio.sleep(0.005)
    raise AssertionError(f"after {seconds:g} s still not: {what}")
