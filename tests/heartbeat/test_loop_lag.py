"""How late a loop is, measured from a thread."""

from __future__ import annotations

import asyncio
import threading

from rsmq.heartbeat.loop_lag import LoopLag
from rsmq.model.clock import awake


async def test_loop_lag_of_a_running_loop_is_the_delay_of_its_last_callback() -> None:
    """It is unknown before the first callback; then it stays the same until the next one."""
    noted = list[float]()
    meter = LoopLag(noted.append)
    assert meter.report(awake()) == {}
    meter.ask(asyncio.get_running_loop(), awake())
    await asyncio.sleep(0)
    lag = meter.lag(awake())
    assert lag is not None
    assert lag == meter.lag(awake() + 100)
    assert meter.report(awake()) == {"loop_lag_ms": round(lag * 1000, 3)}
    assert noted == [lag]
    assert meter.waited(awake() + 100) == 0


async def test_loop_lag_of_a_blocked_loop_grows() -> None:
    """It grows while the callback is pending, and asking again does not reset it."""
    meter, loop, seen = LoopLag(), asyncio.get_running_loop(), list[float | None]()

    def from_outside() -> None:
        asked = awake()
        meter.ask(loop, asked)
        meter.ask(loop, asked + 5)
        seen.extend(meter.lag(asked + later) for later in (1.0, 7.0))
        seen.append(meter.waited(asked + 3))

    thread = threading.Thread(target=from_outside)
    thread.start()
    thread.join()  # blocks the loop
    assert seen[0] is not None
    assert [round(each or 0) for each in seen] == [1, 7, 3]
