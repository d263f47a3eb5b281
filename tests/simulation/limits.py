"""Permits and holds: never more calls at once than the limit, and nothing of a held name starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from rsmq import Concurrency, Message

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.run import Run

FORGIVEN: Final = 20.0
"""Seconds after a loss of data, or a step of the server's clock, in which members may hold too many permits."""
UNSURE: Final = ("restart", "flush", "step", "failover", "reset")


class Limits:
    """The calls that run, by what the limit counts, with the member of each.

    A member that is frozen runs nothing; one that does not believe in its permits is about to cancel what runs.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._running: dict[str, dict[object, Any]] = {}
        self._forgiven_until = 0.0

    def options(self, name_of: Any) -> dict[str, Any]:
        """For the handler."""
        limit, has_names = self._run.plan.calls
        return {} if not limit else {"group_concurrency": Concurrency(limit, by=name_of if has_names else None)}

    def forget(self) -> None:
        """The server has lost data, or its clock was set."""
        self._forgiven_until = self._run.world.now + FORGIVEN

    def starts(self, member: Any, message: Message, name: str) -> None:
        """A handler starts with a message: its name is not held, as far as the member knows. A hold may begin while
        the attempt of a redelivered message is charged, or while a body is brought."""
        if self._run.plan.encoded == "stored":
            return
        for consumer in member.broker.worker.consumers if member.broker.worker is not None else ():
            holds = consumer.holds
            if holds is not None and not message.is_redelivered and not self._run.plan.batch:
                own = name if holds._naming is not None else ""
                if holds._holding(own) is not None:
                    self._run.violate(f"m{member.number} starts {message.id} of {own!r}, which is held")

    @contextmanager
    def running(self, member: Any, name: str) -> Iterator[None]:
        """A call runs."""
        limit, has_names = self._run.plan.calls
        if not limit:
            yield
            return
        process: Process = member.process
        worker = member.broker.worker
        borrower = worker.consumers[0]._borrower if worker is not None and worker.consumers else None
        calls, token = self._running.setdefault(name if has_names else "", {}), object()
        calls[token] = process, borrower
        try:
            true = [each for each in calls.values() if each[0].runs and each[1] is not None and each[1]._is_held()]
            if len(true) > limit and self._run.world.now > self._forgiven_until:
                self._run.violate(f"{len(true)} calls of {name!r} run at once, and the limit is {limit}")
            yield
        finally:
            calls.pop(token, None)
