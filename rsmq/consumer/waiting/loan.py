"""How many calls of one name this member may run at once: the permits that the server has lent it. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

POLL: Final = 0.02
"""Seconds between two calls of a member that has no permit and needs one, while few others do."""
HOLDING: Final = 0.1
"""The same while it has some: with fewer permits than members, each has one for so long."""
CALM: Final = 0.25
"""The same while it has what it needs. What it does not need for so long it gives back."""
FEW: Final = 4
"""Members that wait; more of them ask more rarely."""


class InUse:
    """How many calls run now, and the most of them since the last question."""

    __slots__ = ("_peak", "count")

    def __init__(self) -> None:
        self.count = 0
        self._peak = 0

    def enter(self) -> None:
        """One more."""
        self.count += 1
        self._peak = max(self._peak, self.count)

    def leave(self) -> None:
        """One less."""
        self.count -= 1

    def take_peak(self) -> int:
        """The most of them since this was asked last."""
        peak, self._peak = self._peak, self.count
        return peak


@dataclass(frozen=True, slots=True)
class PermitWish:
    """One call: how many permits the member keeps and wants beside. Later ones have greater numbers, also when a name
    was forgotten in between: the server may know its last call still."""

    number: int
    kept: int
    wanted: int


class Loan:
    """The permits that a member holds of one name, as its last call says. Some of them are `in_use`.

    `most`: so many it may hold while others wait; those above that are given back as soon as their calls end. A call
    that is on its way gives back what it does not claim, so that is not used any more.
    """

    __slots__ = (
        "held",
        "in_use",
        "is_short",
        "key",
        "limit",
        "most",
        "next_call",
        "opened",
        "others",
        "waiting",
        "wants_more",
    )  # fmt: skip

    def __init__(
        self, key: str, limit: int, in_use: InUse, waiting: Callable[[], int], opened: Callable[[], None]
    ) -> None:
        self.key = key
        self.limit = limit
        self.in_use = in_use
        self.waiting = waiting
        """Says how many calls could start if there were permits."""
        self.opened = opened
        """Called when there may be more."""
        self.held = 0
        self.most = limit
        self.others = 0
        self.is_short = False
        """The server has granted less than was wanted."""
        self.wants_more = False
        self.next_call = 0.0

    @property
    def quota(self) -> int:
        """How many calls may run at once."""
        return min(self.held, self.most)

    @property
    def room(self) -> int:
        """How many more may start."""
        return max(0, self.quota - self.in_use.count)

    @property
    def is_clean(self) -> bool:
        """Whether the server believes that this member holds nothing and waits for nothing."""
        return self.held == 0 and not self.is_short

    @property
    def is_to_give_back(self) -> bool:
        """Whether another member waits for a permit that is not in use here."""
        return self.held > self.in_use.count and (
            self.held > self.most or (self.others > 0 and self.held > self.in_use.count + self.waiting())
        )

    def call_at(self, moment: float) -> None:
        """The next call is then; 0: now."""
        self.next_call = moment

    def want_more(self) -> None:
        """A call could start if there were a permit: ask now, unless the server had too few at the last call."""
        self.wants_more = True
        if self.next_call and not self.is_short:
            self.next_call = 0.0

    def ask(self, number: int, calls: int) -> PermitWish:
        """What to say to the server in the call with this number, in a member that can run so many calls at once."""
        used, peak = self.in_use.count, self.in_use.take_peak()
        need = min(calls, used + self.waiting())
        wish = need if self.others else max(need, peak)
        kept = min(self.held, max(used, min(self.most, wish)))
        self.held = kept
        self.wants_more = False
        return PermitWish(number, kept, max(0, min(need, self.limit) - kept))

    def answered(self, claim: PermitWish, kept: int, granted: int, most: int, others: int) -> bool:
        """Take what was granted. False: the server has lost what it had granted, and others have it now."""
        self.held = kept + granted
        self.most = most
        self.others = others
        self.is_short = granted < claim.wanted
        return kept >= min(claim.kept, self.in_use.count)

    def failed(self) -> None:
        """There is no answer: the server may believe that what was wanted is held."""
        self.is_short = True

    def lose(self) -> None:
        """All permits are lost. Calls that are being cancelled still count as in use."""
        self.held = 0
        self.is_short = False

    def pause(self) -> float:
        """Seconds until the next call."""
        if not self.is_short:
            return CALM
        return (HOLDING if self.held else POLL) * max(1, self.others / FEW)

    def __repr__(self) -> str:
        return f"<Loan {self.in_use.count} of {self.quota} in use, {self.held} held>"
