"""The result of the demo detects broken promises, one at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rsmq.cli.demo.result import TOPIC, DemoResult, GroupResult, Handled, result_of
from rsmq.testing.ledger import Ledger, LedgerWriter
from rsmq.testing.verdict import StoredEntry

POISON = StoredEntry(TOPIC, 0, "N1", "p")
STORED = [*(StoredEntry(TOPIC, 0, "N1" if at % 2 else "N2", str(at)) for at in range(10)), POISON]
GOOD = [Handled("commit", 1, float(at), TOPIC, "g", str(at), 1) for at in range(10)]


def result(events: list[Handled], *, poison: tuple[str, ...] = ("p",), dead: tuple[str, ...] = ("p",)) -> GroupResult:
    """The result of group g after departures 0 to 9 and the poison p were sent."""
    return result_of("g", STORED, events, poison, dead)


def test_result_of_a_clean_run_is_good() -> None:
    """Everything handled, in order, the poison is a dead letter."""
    assert result(GOOD).is_good
    assert result(GOOD).handled == 10


@pytest.mark.parametrize(
    ("events", "what"),
    [
        (GOOD[:-1], "lost"),
        ([*GOOD, replace(GOOD[1], message_id="77")], "unexpected"),
        ([*GOOD[2:], GOOD[0], GOOD[1]], "out_of_order"),
        ([*GOOD, GOOD[3]], "unexplained"),
    ],
)
def test_result_finds_each_broken_promise(events: list[Handled], what: str) -> None:
    """A lost message, an invented one, one out of order, and one repeated without a reason."""
    found = result(events)
    assert getattr(found, what)
    assert not found.is_good


def test_result_with_a_redelivery_is_good() -> None:
    """A redelivery has an attempt above 1 and does not change the order."""
    found = result([*GOOD, replace(GOOD[3], attempt=2)])
    assert (found.redelivered, found.unexplained, found.is_good) == (1, 0, True)


def test_result_wants_exactly_the_poison_as_dead_letters() -> None:
    """No dead letter is missing, wrong or doubled."""
    assert result(GOOD, dead=()).missing_dead_letters == ("p",)
    assert result(GOOD, dead=("p", "q")).surplus_dead_letters == ("q",)
    assert not result(GOOD, dead=("p", "p")).is_good


def test_result_ignores_other_groups() -> None:
    """Each group must handle every message itself."""
    assert result([replace(event, group="h") for event in GOOD]).lost == tuple(map(str, range(10)))


def test_result_of_a_kill_without_recovery_is_bad() -> None:
    """After a kill the result is good only if the killed worker's partitions have new owners."""
    assert DemoResult((result(GOOD),), True, 1.5).is_good
    assert not DemoResult((result(GOOD),), True, None).is_good
    assert DemoResult((result(GOOD),), False, None).is_good


def test_ledger_is_read_while_it_grows(tmp_path: Path) -> None:
    """A line that is not finished is read when it is; no line is read twice."""
    ledger = Ledger(tmp_path / "ledger", Handled)
    LedgerWriter(tmp_path / "whole").write(*GOOD[:2])
    data = (tmp_path / "whole").read_bytes()
    ledger.path.write_bytes(data[:-7])
    assert ledger.read() == GOOD[:1]
    ledger.path.write_bytes(data)
    assert ledger.read() == GOOD[1:2]
    assert ledger.read() == []
    assert ledger.events() == GOOD[:2]
