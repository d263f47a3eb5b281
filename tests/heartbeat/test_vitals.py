"""How late a loop is, measured from a thread."""

from __future__ import annotations

import asyncio
import json
import threading

from rsmq.clock import monotonic
from rsmq.heartbeat.vitals import Vitals


async def test_a_loop_that_runs_answers() -> None:
    """Not known before it was asked; then a number, which stays until it is asked again."""
    noted = list[float]()
    vitals = Vitals(noted.append)
    assert json.loads(vitals.report(monotonic())) == {}
    vitals.ask(asyncio.get_running_loop(), monotonic())
    await asyncio.sleep(0)
    lag = vitals.lag(monotonic())
    assert lag is not None
    assert lag == vitals.lag(monotonic() + 100)
    assert json.loads(vitals.report(monotonic())) == {"loop_lag_ms": round(lag * 1000, 3)}
    assert noted == [lag]
    assert vitals.waited(monotonic() + 100) == 0


async def test_a_blocked_loop_is_seen_while_it_is_blocked() -> None:
    """The lag grows as long as nobody answers, and asking again does not start it anew."""
    vitals, loop, seen = Vitals(), asyncio.get_running_loop(), list[float | None]()

    def from_outside() -> None:
        asked = monotonic()
        vitals.ask(loop, asked)
        vitals.ask(loop, asked + 5)
        seen.extend(vitals.lag(asked + later) for later in (1.0, 7.0))
        seen.append(vitals.waited(asked + 3))

    thread = threading.Thread(target=from_outside)
    thread.start()
    thread.join()  # blocks the loop
    assert seen[0] is not None
    assert [round(each or 0) for each in seen] == [1, 7, 3]
