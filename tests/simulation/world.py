"""The virtual clock, the choices of a seed, and the agenda: what happens next is decided here and nowhere else."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

T = TypeVar("T")

EPOCH: Final = 1_800_000_000.0
"""The server's wall clock when virtual time is 0, in seconds since 1970."""


class Choices:
    """The decisions of a seed. Each depends on the seed and its name alone: leaving one out changes no other.

    `only`: the names of the deviations (a fault, a delay) that may happen, if it is not None. `made` lists those that
    happened.
    """

    def __init__(self, seed: int, only: Collection[str] | None = None) -> None:
        self.seed = seed
        self.only = None if only is None else frozenset(only)
        self.made: list[str] = []

    def unit(self, name: str) -> float:
        """A number from 0 to 1."""
        digest = hashlib.blake2b(f"{self.seed}|{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    def between(self, low: float, high: float, name: str) -> float:
        """A number between two."""
        return low + (high - low) * self.unit(name)

    def among(self, options: Sequence[T], name: str) -> T:
        """One of them."""
        return options[int(self.unit(name) * len(options))]

    def allows(self, name: str) -> bool:
        """Whether a planned fault happens; it is noted as made."""
        if self.only is not None and name not in self.only:
            return False
        self.made.append(name)
        return True


@dataclass(order=True)
class Entry:
    """Something on the agenda."""

    at: float
    number: int
    action: Callable[[], None] = field(compare=False)
    is_cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        """Take it off the agenda."""
        self.is_cancelled = True


class World:
    """The clock, in seconds from 0, and the agenda. `trace` gets every event in the order in which it happened."""

    def __init__(self, choices: Choices) -> None:
        self.now = 0.0
        self.choices = choices
        self.trace: list[str] = []
        self.processes: list[Any] = []
        self.current: Any = None
        """The process whose code runs now."""
        self._agenda: list[Entry] = []
        self._number = 0

    def at(self, moment: float, action: Callable[[], None]) -> Entry:
        """Do something at a moment, or now if that has passed. Equal moments keep the order of the calls."""
        self._number += 1
        entry = Entry(max(moment, self.now), self._number, action)
        heapq.heappush(self._agenda, entry)
        return entry

    def after(self, seconds: float, action: Callable[[], None]) -> Entry:
        """Do something later."""
        return self.at(self.now + seconds, action)

    def note(self, text: str) -> None:
        """One line of the trace."""
        self.trace.append(f"{self.now:.6f} {text}")

    def run(self, until: float, is_over: Callable[[], bool]) -> None:
        """Let everything happen until it is over, or until a moment."""
        while not is_over():
            timer = float("inf")
            for process in self.processes:
                if process.ready or process.runnable or process.timer <= self.now:
                    process.run_ready()
                if process.timer < timer:
                    timer = process.timer
            while self._agenda and self._agenda[0].is_cancelled:
                heapq.heappop(self._agenda)
            moment = min(timer, self._agenda[0].at if self._agenda else float("inf"))
            if moment > until:
                self.now = until
                return
            self.now = max(self.now, moment)
            if self._agenda and self._agenda[0].at <= self.now:
                heapq.heappop(self._agenda).action()

    def fingerprint(self) -> str:
        """A digest of the trace."""
        return hashlib.blake2b("\n".join(self.trace).encode(), digest_size=12).hexdigest()
