"""The lookout: sees that a lease has ended, for all handlers of a process, so that none needs a timer of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import anyio.abc

from rsmq.consumer.consumer import Consumer
from rsmq.settings import Settings


class Lookout:
    """Looks at the leases every `presence_interval`: a thousand handlers cost it a thousand comparisons.

    A lease ends by the clock, or by what any role has found out: nobody calls for that, so somebody must look.
    """

    def __init__(self, settings: Settings, consumers: Callable[[], Sequence[Consumer]]) -> None:
        self._consumers = consumers
        self._interval = settings.presence_interval.total_seconds()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        while True:
            await anyio.sleep(self._interval)
            self.look()

    def look(self) -> None:
        """Once."""
        for consumer in self._consumers():
            if not all(lane.lease.is_held() for lane in consumer.lanes.values()):
                consumer.membership.rouse()

    def __repr__(self) -> str:
        return f"<Lookout every {self._interval:g} s>"
