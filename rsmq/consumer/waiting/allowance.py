"""What a member may start of one name under a rate over the group: blocks that the server has granted. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

AHEAD: Final = 2
"""Times the pause between two calls: a start that becomes free so soon is granted in advance."""
HOLD_MS: Final = 2000
"""What is granted may be used for so long, and counts until then if its member dies."""
SPARE: Final = 16
"""The part of the limit that a member asks for beyond its need, while there is enough for all."""


@dataclass(slots=True)
class Question:
    """One call: how many starts the member still holds and wants, and when it has used how many others."""

    kept: int
    wanted: int
    used: list[tuple[float, int]]
    sent: float


class Allowance:
    """The starts that a member holds, each from a moment on, and when it has used others. All until `end`.

    `pending` is taken, and its use is not known yet: its message waits for the charge of its attempt. It counts as
    held. The server may say that it counts less of what is held than the member does (it has lost its data, or did not
    hear of the member for too long). Then nothing of that may be used: `losses` counts how often.
    """

    __slots__ = ("_blocks", "_used", "end", "is_short", "losses", "pending", "recent")

    def __init__(self) -> None:
        self._blocks: list[tuple[float, int]] = []
        self._used: dict[float, int] = {}
        self.end = 0.0
        self.pending = self.losses = 0
        self.recent = 0
        """How many were used in the last pause between two calls."""
        self.is_short = False
        """The server had less than was wanted."""

    @property
    def held(self) -> int:
        """How many may be used now or later."""
        return sum(number for _, number in self._blocks)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to say to the server."""
        return not (self._blocks or self._used or self.pending or self.recent)

    def take(self, now: float, most: int = 1) -> int:
        """Use up to so many now, as far as there are some. Returns how many: `note`, or `put_back`, must follow."""
        blocks, taken = self._blocks, 0
        if blocks and blocks[0][1] > most and blocks[0][0] <= now < self.end:  # nearly always
            blocks[0] = blocks[0][0], blocks[0][1] - most
            return most
        while taken < most and blocks and blocks[0][0] <= now < self.end:
            begin, number = blocks[0]
            part = min(number, most - taken)
            taken += part
            if number > part:
                blocks[0] = (begin, number - part)
            else:
                del blocks[0]
        return taken

    def take_whole(self, now: float, number: int) -> bool:
        """Use exactly so many now, or none."""
        return self.usable(now) >= number and self.take(now, number) == number

    def put_back(self, now: float, number: int) -> None:
        """So many that were taken now are not used."""
        if self._blocks and self._blocks[0][0] <= now:
            begin, others = self._blocks.pop(0)
            now, number = begin, others + number
        self._blocks.insert(0, (now, number))

    def hold_pending(self, number: int = 1) -> int:
        """What a message has taken waits for the charge of its attempt. Returns the number of losses, for
        `end_pending`."""
        self.pending += number
        return self.losses

    def end_pending(self, losses: int, number: int = 1) -> bool:
        """It waits no longer. False: the server has lost what was granted since."""
        if losses == self.losses:
            self.pending -= number
        return losses == self.losses

    def note(self, now: float, number: int = 1) -> None:
        """What was taken is used now. Uses within a 1024th of a second count together, at its end."""
        at = ceil(1024 * now) / 1024
        self._used[at] = self._used.get(at, 0) + number

    def usable(self, now: float) -> int:
        """How many may be used now."""
        return sum(number for begin, number in self._blocks if begin <= now) if now < self.end else 0

    def next_begin(self, now: float) -> float | None:
        """When more may be used than now."""
        return next((begin for begin, _ in self._blocks if begin > now), None)

    def ask(self, now: float, waiting: int, calls: int, limit: int) -> Question:
        """What to say to the server. `calls`: how many messages can run at once.

        What is not needed soon is given back now, so it must not be used any more. A member whose handlers are slow
        asks for no more than they can use, however much waits.
        """
        self.recent = max(0, sum(self._used.values()))
        need = min(waiting, max(calls, 4 * self.recent)) + 2 * self.recent
        if not self.is_short and need:
            need += limit // SPARE
        self._keep(min(need, self.held))
        used, self._used = list(self._used.items()), {}
        kept = self.held
        return Question(kept + self.pending, min(limit, max(0, need - kept)), used, now)

    def _keep(self, number: int) -> None:
        """Only so many, the earliest ones."""
        kept = list[tuple[float, int]]()
        for begin, each in self._blocks:
            if number > 0:
                kept.append((begin, min(each, number)))
                number -= each
        self._blocks = kept

    def yield_all(self) -> None:
        """Give back with the next question what is held: it does not suffice, and others may wait for it."""
        self._blocks = []

    def advance(self, seconds: float) -> None:
        """A test has moved the clock."""
        self._blocks = [(begin - seconds, number) for begin, number in self._blocks]
        self._used = {at - seconds: number for at, number in self._used.items()}
        self.is_short = False

    def failed(self, question: Question) -> None:
        """There is no answer: the uses are reported again. To report one twice is harmless."""
        for at, number in question.used:
            self.note(at, number)

    def answered(self, question: Question, reply: Sequence[int], now: float, ahead: float) -> None:
        """Take what was granted."""
        if reply[0] < question.kept:
            self._blocks = []
            self.losses += 1
            self.pending = 0
        granted = [(now + wait / 1000, number) for wait, number in zip(reply[1::2], reply[2::2], strict=True)]
        self.is_short = sum(number for _, number in granted) < question.wanted
        self._blocks = sorted(self._blocks + granted)
        self.end = question.sent + ahead + HOLD_MS / 1000

    def __repr__(self) -> str:
        return f"<Allowance {self.held} held, {self.pending} pending>"


class EvenAllowance(Allowance):
    """The same with a burst: what could not be used in its moment does not come all at once later."""

    __slots__ = ("_burst", "_even", "_interval")

    def __init__(self, interval: float, burst: int) -> None:
        super().__init__()
        self._interval, self._burst = interval, burst
        self._even = 0.0

    def _open(self, now: float) -> int:
        """How many may start now, if there were enough."""
        early = now - (self._even - (self._burst - 1) * self._interval)
        return 0 if early < 0 else min(self._burst, 1 + int(early / self._interval))

    def take(self, now: float, most: int = 1) -> int:
        """Use up to so many now."""
        taken = super().take(now, min(most, self._open(now)))
        self._even = max(self._even, now) + taken * self._interval if taken else self._even
        return taken

    def put_back(self, now: float, number: int) -> None:
        """So many that were taken now are not used."""
        super().put_back(now, number)
        self._even -= number * self._interval

    def advance(self, seconds: float) -> None:
        """A test has moved the clock."""
        super().advance(seconds)
        self._even -= seconds

    def usable(self, now: float) -> int:
        """How many may be used now."""
        return min(super().usable(now), self._open(now))

    def next_begin(self, now: float) -> float | None:
        """When more may be used than now."""
        opens = self._even - (self._burst - 1) * self._interval
        if opens > now and super().usable(now):
            return opens
        found = super().next_begin(now)
        return None if found is None else max(found, opens)


def ages(used: Sequence[tuple[float, int]], now: float, step: float) -> list[int]:
    """Uses as pairs of age in ms and number, as the script reads them: in steps of so many seconds, never older."""
    rounded = Counter[int]()
    for at, number in used:
        rounded[max(0, int((now - at) / step))] += number
    return [part for steps, number in rounded.items() for part in (int(steps * step * 1000), number)]
