"""The catalogue is complete, and what it says about other tests is true."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.catalogue import ELSEWHERE, load

ROOT = Path(__file__).parents[2]
DESIGN = {*range(1, 22), *range(23, 28), 29, 30, 32, 33, 34, 36, 37, 39, 40, 41, 42, 43, 45, 46, *range(47, 53)}
"""The numbers of the design's catalogue that are played, here or elsewhere."""


def test_every_fault_of_the_design_is_played() -> None:
    """No number of the design's catalogue is left out, and at least ten are our own."""
    numbers = [number for one in [*load(), *ELSEWHERE] for number in one.number.split(", ")]
    assert {int(number) for number in numbers if number.isdigit()} >= DESIGN
    assert len({number for number in numbers if number.startswith("A")}) >= 10


def test_what_others_play_exists() -> None:
    """A renamed test must not leave a hole in the catalogue."""
    for place in [place for one in ELSEWHERE for place in one.tests]:
        path, _, name = place.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text() if name else (ROOT / path).exists(), place
