"""Cancelled messages of a run: each id ends in exactly one of handled, cancelled, dead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import anyio

from rsmq import Broker, Cancelled, MessageRef, Settled
from rsmq.errors import RsmqError
from tests.chaos.checker import Name
from tests.chaos.ledger import Event

if TYPE_CHECKING:
    from tests.simulation.run import Run

LONGEST = 4.0
"""Seconds between a publish and its cancel."""
ATTEMPTS = 20
"""A lost answer is asked for again."""


class Cancels:
    """What the publisher has cancelled, and what it was answered.

    `done`: answered with Cancelled, and when. `open`: may end in either way: the answer was Running or Unknown, or it
    got lost, or the server has lost it. `tried`: the cancel has begun.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.done = dict[Name, float]()
        self.open, self.tried = set[Name](), set[Name]()

    async def cancel(self, broker: Broker, ref: MessageRef, name: Name) -> None:
        """Cancel a message a while after it was published."""
        choices, world = self._run.world.choices, self._run.world
        await anyio.sleep(choices.between(0, LONGEST, f"cancel {name} at"))
        # a batch is interrupted as a whole, so its other messages are handled twice
        is_running = not self._run.plan.batch and choices.unit(f"cancel {name} running") < 0.3
        self.tried.add(name)
        self.open.add(name)
        for _ in range(ATTEMPTS):
            try:
                answer = await broker.cancel(ref, running=is_running)
            except RsmqError as error:
                world.note(f"   cancelling {name} failed: {error!r}")
                await anyio.sleep(0.5)
                continue
            world.note(f"   cancelling {name}: {answer}")
            if isinstance(answer, Cancelled):
                self.done[name] = world.now
            if isinstance(answer, Cancelled | Settled):
                self.open.discard(name)
            return

    def starts(self, name: Name, member: int) -> None:
        """A handler is called: not after the answer that it will not."""
        if name in self.done and self._run.world.now >= self._run.unsure_until:
            self._run.violate(f"{name} starts in m{member} after it was cancelled")

    def forget(self, since: float) -> None:
        """The server has lost its last writes, and so perhaps marks."""
        self.open |= {name for name in self.tried if self.done.get(name, since) >= since}
        self.done = {name: at for name, at in self.done.items() if name not in self.open}

    def wrong(self, events: Iterable[Event], excused: Iterable[int], dead: Iterable[Name]) -> list[str]:
        """Cancelled messages that were handled, or are dead letters, too. A worker that was struck may have handled one
        and not settled it: then it could be cancelled."""
        if self._run.was_reset:  # it may have been handled, or buried, in the run before
            return []
        strange = set(excused)
        handled = {(each.key, each.n) for each in events if each.what == "commit" and each.pid not in strange}
        return [
            *[f"{name} was cancelled and handled" for name in sorted(self.done.keys() & handled)],
            *[f"{name} was cancelled and is a dead letter" for name in sorted(self.done.keys() & set(dead))],
        ]
