"""How a handler takes from the bands of its topic: which one is next, and which slots are kept for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal

Pick = Literal["strict"] | Mapping[str, int]

AGED_TURN: Final = 8
"""Of so many starts one is for what is older than `aging`. More, and an urgent message would wait behind all of a
campaign as soon as that has become old."""


@dataclass(frozen=True)
class BandRules:
    """`weights`: starts of each band in turn; None is strict, the highest first. `aging`: what waits longer gets every
    eighth start under strict; None is never. `reserve`: slots that only this band may take."""

    weights: Mapping[str, int] | None = None
    aging: timedelta | None = timedelta(seconds=30)
    reserve: Mapping[str, int] = field(default_factory=dict)

    @property
    def reserved(self) -> int:
        """How many slots are kept in all."""
        return sum(self.reserve.values())

    @property
    def named(self) -> set[str]:
        """The bands that the topic must have."""
        return {*self.reserve, *(self.weights or ())}
