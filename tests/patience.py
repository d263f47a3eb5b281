"""Waiting for a state in tests with an event loop; `tests.servers.wait_until` is for those without."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isawaitable

import anyio

PATIENCE = 60.0
"""Seconds. No test measures time: this only ends a test that would hang."""


async def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Wait until `condition()`, awaited if it is awaitable, is true; fail with `what` after `seconds`."""
    with anyio.move_on_after(seconds):
        while True:
            found = condition()
            if await found if isawaitable(found) else found:
                return
            await anyio.sleep(0.005)
    raise AssertionError(f"after {seconds:g} s still not: {what}")
