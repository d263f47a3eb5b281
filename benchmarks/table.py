"""Tables of a generated page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a table; the first column is text, the others are figures."""
    lines = [row_of(head), "|---|" + "--:|" * (len(head) - 1)]
    return [*lines, *(row_of([figure(cell) for cell in row]) for row in rows)]


def row_of(cells: Sequence[str]) -> str:
    """One line."""
    return f"| {' | '.join(cells)} |"


def figure(value: Any) -> str:
    """A number as people read it: about three digits that count."""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)


def mib(size: float) -> float:
    """Bytes as MiB."""
    return size / (1 << 20)
