"""The history of a run, from the ledger: how many letters waited, and how fast phones received their backlog."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from ledger import AGAIN, CONNECTED, LEFT, NEW, Entry
from numpy.typing import NDArray

STEP: Final = 0.1
"""Seconds between two points of the chart."""

Numbers = NDArray[np.float64]


@dataclass
class Visit:
    """A time online: its start, how many letters had been waiting, and when the last of them was received."""

    start: float
    letters: int = 0
    done: float = 0.0

    @property
    def seconds(self) -> float:
        """How long the backlog took."""
        return self.done - self.start


@dataclass
class Level:
    """A number over time, as the moments at which it rises and falls."""

    ups: list[float] = field(default_factory=list)
    downs: list[float] = field(default_factory=list)

    def lasts(self, start: float, end: float) -> None:
        """Add one from `start` to `end`."""
        self.ups.append(start)
        self.downs.append(end)

    def at(self, times: Numbers) -> Numbers:
        """The number at each of these moments."""
        ups, downs = np.sort(self.ups), np.sort(self.downs)
        return (np.searchsorted(ups, times, "right") - np.searchsorted(downs, times, "right")).astype(float)


class History:
    """The events of a run, in seconds since `start`.

    A letter waits until its phone receives it: `away` while the phone is offline, `on_its_way` while it is online. The
    letters that were published before the phone connected are its backlog.
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
        self._online: dict[str, Visit] = {}
        self._seen: set[tuple[str, int]] = set()
        self.end = self._read(sorted(entries, key=lambda entry: entry.at_ms))

    def seconds(self, at_ms: float) -> float:
        """The time of an event of the ledger."""
        return at_ms / 1000 - self._start

    @property
    def times(self) -> Numbers:
        """The times of the chart."""
        return np.arange(0, self.end + STEP, STEP)

    def _read(self, entries: list[Entry]) -> float:
        """Process all entries in order; returns the time of the last one."""
        cut = self.outage
        at = 0.0
        for entry in entries:
            at = self.seconds(entry.at_ms)
            if cut is not None and at >= cut[0]:
                for phone in self._cut_off:
                    self._leave(phone, cut[0])
                cut = None
            if entry.event == CONNECTED:
                self._online[entry.phone] = Visit(at)
            elif entry.event == LEFT:
                self._leave(entry.phone, at)
            elif entry.event in (NEW, AGAIN):
                self._receive(entry, at)
        for phone in list(self._online):
            self._leave(phone, at)
        return at

    def _receive(self, entry: Entry, at: float) -> None:
        letter = (entry.phone, entry.flight)
        if letter in self._seen:
            return
        visit, published = self._online[entry.phone], self.seconds(entry.published_ms)
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
        """The phone goes offline, if it was online."""
        visit = self._online.pop(phone, None)
        if visit is None:
            return
        self.connected.lasts(visit.start, at)
        if visit.letters:
            self.visits.append(visit)
