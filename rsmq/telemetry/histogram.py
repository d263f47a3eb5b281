"""A histogram that costs a bisection: one writer, any number of readers, no lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds: from a handler that only computes to one that waits for people's servers."""


class Histogram:
    """Counts durations by upper bound, in seconds. Written by one thread; a reader may see a count before its sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Upper bound as text, and how many were at most that."""
        bounds = [*(repr(bound) for bound in self.bounds), "+Inf"]
        return zip(bounds, accumulate(self.counts[:]), strict=True)

    def __repr__(self) -> str:
        return f"<Histogram {sum(self.counts)} in {self.sum:.3f} s>"
