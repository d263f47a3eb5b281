"""What the server refuses for now, again and again: for probes, which say what stands still and why."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from rsmq.errors import BrokerUnavailable
from rsmq.model.clock import monotonic

FORGET: Final = 15.0
"""Seconds after which a call that was not repeated says nothing any more: who made it has given up."""


@dataclass(slots=True)
class Refusal:
    """A call that was refused each time it was made between `since` and `last`."""

    since: float
    last: float
    text: str


class Refusals:
    """The calls of one process that the server does not execute now. All connections of a connector share it.

    A call is a command of a client, or all that goes through one raw connection: it counts as refused until it is
    executed. Calls are noted in the event loop; any thread may read.
    """

    def __init__(self) -> None:
        self._by_call: dict[Hashable, Refusal] = {}

    def __bool__(self) -> bool:
        return bool(self._by_call)

    def note(self, call: Hashable, error: BrokerUnavailable) -> None:
        """A call was refused, or got no answer."""
        now = monotonic()
        self._by_call = {call: each for call, each in self._by_call.items() if now - each.last < FORGET}
        refusal = self._by_call.setdefault(call, Refusal(now, now, ""))
        refusal.last = now
        refusal.text = str(error)

    def done(self, call: Hashable) -> None:
        """A call was executed."""
        self._by_call.pop(call, None)

    def standing(self, seconds: float) -> list[str]:
        """What calls have been refused with for so long, a line each."""
        now = monotonic()
        longest = dict[str, float]()
        for each in list(self._by_call.values()):
            if each.last - each.since >= seconds and now - each.last < FORGET:
                longest[each.text] = max(longest.get(each.text, 0.0), now - each.since)
        return [f"calls to the server have failed for {age:.0f} s: {text}" for text, age in sorted(longest.items())]

    def __repr__(self) -> str:
        return f"<Refusals {len(self._by_call)}>"
