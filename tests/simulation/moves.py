"""Rescheduled messages of a run: none starts before the time that the answer has named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from rsmq import Broker, ConfigError, MessageRef
from rsmq.errors import RsmqError
from tests.chaos.checker import Name

if TYPE_CHECKING:
    from tests.simulation.run import Run

LONGEST = 3.0
"""Seconds between a publish and the first question, and the longest delay that is asked for."""
ATTEMPTS = 20
"""Most messages are not parked when they are asked for; a lost answer is asked for again."""


class Moves:
    """What the publisher has rescheduled. `until`: the world's time before which a message must not start."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._until = dict[Name, float]()
        self._forgotten_at = 0.0
        self.done = 0

    async def move(self, broker: Broker, ref: MessageRef, name: Name) -> None:
        """Reschedule a message as soon as it is delayed or parked, a while after it was published."""
        choices, world = self._run.world.choices, self._run.world
        await anyio.sleep(choices.between(0, LONGEST, f"move {name} at"))
        delay = choices.among([0.0, 1.0], f"move {name} later") * choices.between(0, LONGEST, f"move {name} by")
        for _ in range(ATTEMPTS):
            asked = world.now
            try:
                await broker.reschedule(ref, delay=f"{delay:.3f}s")
            except ConfigError:
                await anyio.sleep(0.1)
                continue
            except RsmqError as error:
                world.note(f"   moving {name} failed: {error!r}")
                await anyio.sleep(0.5)
                continue
            world.note(f"   moving {name} by {delay:.3f} s")
            if asked >= self._run.unsure_until and asked > self._forgotten_at:
                self._until[name] = asked + delay
            self.done += 1
            return

    def starts(self, name: Name, member: int) -> None:
        """A handler is called: not before the time that was answered."""
        until, world = self._until.get(name, 0.0), self._run.world
        if world.now < until - 0.01 and world.now >= self._run.unsure_until:
            self._run.violate(f"{name} starts in m{member} {until - world.now:.3f} s before the time it was moved to")

    def forget(self) -> None:
        """The server has lost its last writes, its groups were reset, or its clock was set."""
        self._until.clear()
        self._forgotten_at = self._run.world.now
