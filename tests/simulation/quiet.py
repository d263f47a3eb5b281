"""Messages of a run that wait for a time: none starts before the time that its handler's rule has named."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from rsmq import Message
from rsmq.model.clock import from_epoch_ms
from tests.chaos.checker import Name
from tests.simulation.world import EPOCH

if TYPE_CHECKING:
    from tests.simulation.run import Run

SHARE: Final = 0.4
"""Of the messages; the others start at once."""
LONGEST: Final = 4.0
"""Seconds after it was stored, until a message may start."""


class Quiet:
    """The rule, and what must hold. A message that was rescheduled starts at another time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is_sure = True

    def forget(self) -> None:
        """The server's clock was set: what waited ends early, once."""
        self._is_sure = False

    def options(self) -> dict[str, Any]:
        """For the handler."""
        return {"when": self.due} if self._run.plan.has_quiet else {}

    def due(self, message: Message) -> datetime | None:
        """From when on a message may start."""
        choices, name = self._run.world.choices, self._run.name_in(message)
        if choices.unit(f"quiet {name}") >= SHARE:
            return None
        stored = int(message.stream_id.partition("-")[0])
        return from_epoch_ms(stored + round(1000 * choices.between(0, LONGEST, f"quiet {name} for")))

    def starts(self, name: Name, message: Message, member: int) -> None:
        """A handler is called with a message."""
        run = self._run
        due = self.due(message) if run.plan.has_quiet else None
        if due is None or not self._is_sure or run.plan.moves or run.world.now < run.unsure_until:
            return
        early = due.timestamp() - EPOCH - run.world.now
        if early > 0.01:
            run.violate(f"{name} starts in m{member} {early:.3f} s before its time")
