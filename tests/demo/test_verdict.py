"""The verdict must be able to fail: one broken promise at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rsmq.demo.ledger import Entry, Reader
from rsmq.demo.verdict import GroupVerdict, Verdict, judge

GOOD = [Entry(at, "g", at, "N1" if at % 2 else "N2", at // 2, 1) for at in range(10)]


def verdict_on(
    entries: list[Entry], *, poison: tuple[str, ...] = ("p",), dead: tuple[str, ...] = ("p",)
) -> GroupVerdict:
    """The verdict when departures 0 to 9 were sent."""
    return judge("g", range(10), entries, poison, dead)


def test_a_clean_run_is_good() -> None:
    """Everything once, in order, the poison where it belongs."""
    assert verdict_on(GOOD).is_good
    assert verdict_on(GOOD).handled == 10


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        (GOOD[:-1], "lost"),
        ([*GOOD, Entry(99, "g", 77, "N9", 0, 1)], "unexpected"),
        ([replace(GOOD[1], at_ns=50), *GOOD[2:], GOOD[0]], "out_of_order"),
        ([*GOOD, replace(GOOD[3], at_ns=50)], "unexplained"),
    ],
)
def test_each_broken_promise_is_found(entries: list[Entry], what: str) -> None:
    """A lost, an invented, an overtaking, and an inexplicably repeated message."""
    verdict = verdict_on(entries)
    assert getattr(verdict, what)
    assert not verdict.is_good


def test_a_redelivery_is_no_fault() -> None:
    """It says so by its attempt, and repeats without reordering."""
    verdict = verdict_on([*GOOD, replace(GOOD[3], at_ns=50, attempt=2)])
    assert (verdict.redelivered, verdict.is_good) == (1, True)


def test_dead_letters_must_be_exactly_the_poison() -> None:
    """None missing, none of an innocent, none twice."""
    assert verdict_on(GOOD, dead=()).missing_dead_letters == ("p",)
    assert verdict_on(GOOD, dead=("p", "q")).surplus_dead_letters == ("q",)
    assert not verdict_on(GOOD, dead=("p", "p")).is_good


def test_other_groups_do_not_count() -> None:
    """Each group has to handle everything itself."""
    assert verdict_on([replace(entry, group="h") for entry in GOOD]).lost == tuple(range(10))


def test_a_kill_without_recovery_is_bad() -> None:
    """The whole is good only if the dead worker's partitions moved."""
    assert Verdict((verdict_on(GOOD),), True, 1.5).is_good
    assert not Verdict((verdict_on(GOOD),), True, None).is_good
    assert Verdict((verdict_on(GOOD),), False, None).is_good


def test_a_ledger_is_read_as_it_grows(tmp_path: Path) -> None:
    """A line that is not finished waits for its end; nothing is read twice."""
    file, reader = tmp_path / "1.ledger", Reader(tmp_path)
    file.write_text(GOOD[0].line() + GOOD[1].line()[:7])
    assert reader.read() == GOOD[:1]
    file.write_text(GOOD[0].line() + GOOD[1].line())
    assert reader.read() == GOOD[1:2]
    assert reader.read() == []
    assert reader.entries == GOOD[:2]
