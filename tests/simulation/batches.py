"""All messages as members of one batch: its callback comes once, after the last of them, with the ledger's numbers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import anyio

from rsmq import BatchEnded, BatchExists, Broker
from rsmq.errors import RsmqError
from tests.chaos.checker import Name
from tests.simulation.plan import GROUP

if TYPE_CHECKING:
    from tests.simulation.run import Run

CALLBACKS: Final = "callbacks"
AGAIN: Final = 0.5
"""Seconds before the next attempt to open or to close, while the server is away."""


class Batches:
    """Opens the batch, publishes by it, closes it, and reads the topic of its callback.

    What the server has lost, or a reset has skipped or brought back, may be missing, or come before its members: then
    there is one callback at most.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.publisher: Callable[..., Any] | None = None
        """How members are published; None: the run has no batch."""

    @asynccontextmanager
    async def opened(self, broker: Broker) -> AsyncIterator[None]:
        """The batch is open in the block."""
        if not self._run.plan.in_batch:
            yield
            return
        batch = broker.batch("all", group=GROUP, on_complete=CALLBACKS)
        await self._until_done(batch.__aenter__)
        self.publisher = batch.publish
        yield
        await self._until_done(batch.close)
        self._run.world.note(f"   {batch!r} is closed")

    async def _until_done(self, act: Callable[[], Any]) -> None:
        while True:
            try:
                await act()
                return
            except (BatchEnded, BatchExists) as error:  # the server has lost it
                if not self._run.has_lost_writes:
                    self._run.violate(f"the publisher gets {error!r}")
                return
            except RsmqError as error:
                self._run.world.note(f"   the batch waits: {error!r}")
                await anyio.sleep(AGAIN)

    @property
    def _is_sure(self) -> bool:
        return not (self._run.was_reset or self._run.has_lost_writes)

    def starts(self, name: Name) -> None:
        """A handler is called with a message."""
        run = self._run
        if not run.plan.in_batch or not self._is_sure or name[0] == "tick":
            return
        if self._calls() and name not in {(event.key, event.n) for event in run.events if event.what == "commit"}:
            run.violate(f"{name} starts after the callback")

    def _calls(self) -> list[dict[str, Any]]:
        run, found = self._run, list[dict[str, Any]]()
        keys = run.members[0].broker.keys
        for partition in range(run.plan.partitions):
            rows = run.network.ask("XRANGE", keys.stream(CALLBACKS, partition), "-", "+")
            found += [run.encoded.order(dict(zip(each[::2], each[1::2], strict=True))) for _, each in rows]
        return found

    def wrong(self, letters: Sequence[tuple[Name, str]]) -> list[str]:
        """What is wrong at the end, when nothing is left to handle."""
        run = self._run
        if not run.plan.in_batch or self.publisher is None:
            return []
        calls = self._calls()
        if len(calls) > 1 or (self._is_sure and not calls):
            return [f"{len(calls)} callbacks of the batch"]
        if not self._is_sure:
            return []
        (call,) = calls
        stored = {name for name in run.stored if name[0] != "tick"}
        dead = {name for name, reason in letters if reason != "expired" and name[0] != "tick"}
        wrong = [f"the callback has missing members: {call}"] if call["missing"] or call["state"] != "complete" else []
        if call["total"] < len(stored):
            wrong.append(f"the callback has fewer members than the {len(stored)} stored ones: {call}")
        if call["failed"] != len(dead):
            wrong.append(f"the callback has not the {len(dead)} dead letters: {call}")
        return wrong

    def __repr__(self) -> str:
        return f"<Batches of {self._run!r}>"
