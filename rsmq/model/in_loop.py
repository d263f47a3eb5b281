"""Whether this thread runs an event loop."""

from __future__ import annotations

import asyncio


def is_in_loop() -> bool:
    """Whether it does now: a context manager for both worlds asks which of its two ways is meant."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
