"""The history of a run, as the ledgers tell it: who waited where, and how fast they caught up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from ledger import AGAIN, CONNECTED, LEFT, NEW, Entry
from numpy.typing import NDArray

STEP: Final = 0.1
"""Seconds between two moments looked at."""

Numbers = NDArray[np.float64]


@dataclass
class Visit:
    """A stay online: since when, how many letters had waited by then, and until when the last of them had come."""

    start: float
    letters: int = 0
    done: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it took to catch up."""
        return self.done - self.start


@dataclass
class Level:
    """A number over time, told by what makes it rise and fall."""

    ups: list[float] = field(default_factory=list)
    downs: list[float] = field(default_factory=list)

    def lasts(self, start: float, end: float) -> None:
        """One more from one moment to another."""
        self.ups.append(start)
        self.downs.append(end)

    def at(self, times: Numbers) -> Numbers:
        """The number at each of these moments."""
        ups, downs = np.sort(self.ups), np.sort(self.downs)
        return (np.searchsorted(ups, times, "right") - np.searchsorted(downs, times, "right")).astype(float)


class History:
    """What happened when, in seconds since `start`.

    A letter waits from its publishing until it reaches its phone. What was published before the phone connected is its
    backlog and waits `away` until then; from then on, as what is published meanwhile, it is `on_its_way`.
    """

    def __init__(
        self, entries: Iterable[Entry], start: float, outage: tuple[float, float] | None, cut_off: Iterable[str]
    ) -> None:
        self.connected, self.away, self.on_its_way = Level(), Level(), Level()
        self.visits: list[Visit] = []
        self.latencies: list[float] = []
        self._start = start
        self.outage = None if outage is None else (outage[0] - start, outage[1] - start)
        self._cut_off = list(cut_off)
        self._here: dict[str, Visit] = {}
        self._seen: set[tuple[str, int]] = set()
        self.end = self._read(sorted(entries, key=lambda entry: entry.at_ms))

    def seconds(self, at_ms: float) -> float:
        """A moment of a ledger."""
        return at_ms / 1000 - self._start

    @property
    def times(self) -> Numbers:
        """The moments to look at."""
        return np.arange(0, self.end + STEP, STEP)

    def _read(self, entries: list[Entry]) -> float:
        """Take all entries in their order; returns when the last one was."""
        cut = self.outage
        at = 0.0
        for entry in entries:
            at = self.seconds(entry.at_ms)
            if cut is not None and at >= cut[0]:
                for phone in self._cut_off:
                    self._leave(phone, cut[0])
                cut = None
            if entry.event == CONNECTED:
                self._here[entry.phone] = Visit(at)
            elif entry.event == LEFT:
                self._leave(entry.phone, at)
            elif entry.event in (NEW, AGAIN):
                self._receive(entry, at)
        for phone in list(self._here):
            self._leave(phone, at)
        return at

    def _receive(self, entry: Entry, at: float) -> None:
        letter = (entry.phone, entry.flight)
        if letter in self._seen:
            return
        visit, published = self._here[entry.phone], self.seconds(entry.published_ms)
        self._seen.add(letter)
        if published < visit.start:
            visit.letters += 1
            visit.done = at
            self.away.lasts(published, visit.start)
            self.on_its_way.lasts(visit.start, at)
        else:
            self.latencies.append(at - published)
            self.on_its_way.lasts(published, at)

    def _leave(self, phone: str, at: float) -> None:
        """Its stay has ended, if it was here."""
        visit = self._here.pop(phone, None)
        if visit is None:
            return
        self.connected.lasts(visit.start, at)
        if visit.letters:
            self.visits.append(visit)
