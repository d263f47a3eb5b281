"""The catalogue is complete, and the tests that it names exist."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.catalogue import ELSEWHERE, load

ROOT = Path(__file__).parents[2]
DESIGN = {*range(1, 22), *range(23, 28), 29, 30, 32, 33, 34, 36, 37, 39, 40, 41, 42, 43, 45, 46, *range(47, 53)}
"""The numbers of the design's catalogue that a scenario or another test covers."""


def test_catalogue_covers_every_fault_of_the_design() -> None:
    """Every number of the design's catalogue is covered, and at least ten faults are added."""
    numbers = [number for one in [*load(), *ELSEWHERE] for number in one.number.split(", ")]
    assert {int(number) for number in numbers if number.isdigit()} >= DESIGN
    assert len({number for number in numbers if number.startswith("A")}) >= 10


def test_an_added_fault_has_a_number_of_its_own() -> None:
    """The page of results names it by that."""
    numbers = [one.number for one in load() if one.number.startswith(("A", "G"))]
    assert sorted(numbers) == sorted(set(numbers))


def test_tests_named_by_the_catalogue_exist() -> None:
    """A renamed test must not disappear from the catalogue."""
    for test in [test for one in ELSEWHERE for test in one.tests]:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text() if name else (ROOT / path).exists(), test
