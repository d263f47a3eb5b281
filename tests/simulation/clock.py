"""The functions of `time`, on the virtual clock while a world is played, and as always otherwise.

Import this before `rsmq`, which keeps `time.monotonic` under a name of its own.
"""

from __future__ import annotations

import time
from typing import Any, Final

from tests.simulation import threads
from tests.simulation.threads import WORLD, world
from tests.simulation.world import EPOCH

START: Final = 1000.0
"""The monotonic clock when virtual time is 0."""
real_clock: Final = time.perf_counter


def _replace(name: str, virtual: Any) -> None:
    real = getattr(time, name)
    setattr(time, name, lambda *args: virtual(*args) if WORLD else real(*args))


_replace("monotonic", lambda: START + world().now)
_replace("perf_counter", lambda: START + world().now)
_replace("clock_gettime", lambda _: START + world().now)
_replace("monotonic_ns", lambda: int((START + world().now) * 1e9))
_replace("time", lambda: EPOCH + world().now)
_replace("time_ns", lambda: int((EPOCH + world().now) * 1e9))
_replace("sleep", lambda seconds: threads.current().wait(seconds))
