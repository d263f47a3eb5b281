"""The page of results."""

from __future__ import annotations

from collections import Counter

from tests.chaos.bank import unsound
from tests.chaos.checker import History
from tests.chaos.result import WITH_BANK, Result, added_up, banked


def piece(seed: int, server: str = "valkey-9.1", verdict: str = "clean") -> Result:
    """Half an hour of the mix."""
    return Result("mix", server, seed, verdict, handled=1500, duplicates=7, recovery=seed / 2, took=1800)


def test_pieces_of_the_mix_are_added_up_for_each_server() -> None:
    """Time and counts are sums, the recovery is the longest, and pieces that are not clean are counted."""
    lines = added_up([piece(1), piece(2), piece(3, verdict="broken"), piece(1, "redis-8.2")])
    assert lines[1:] == [
        "| valkey-9.1 | 3 | 1.50 | 1.5 s | 4 500 | 21 | 1 |",
        "| redis-8.2 | 1 | 0.50 | 0.5 s | 1 500 | 7 | 0 |",
    ]


def test_page_without_a_piece_of_the_mix_has_no_table_of_it() -> None:
    """Other scenarios are not added up."""
    assert added_up([Result("sigkill hash", "valkey-9.1", 1, "clean")]) == []


def test_runs_with_the_bank_have_a_table() -> None:
    """A line for each server; other runs do not count."""
    name = f"sigkill{WITH_BANK}"
    runs = [Result(name, "valkey-9.1", seed, "clean", booked=700, restarted=seed) for seed in (1, 2)]
    lines = banked(
        [*runs, Result(f"nap{WITH_BANK}", "valkey-9.1", 1, "broken", booked=50), Result("nap", "x", 1, "clean")]
    )
    assert lines[1:] == ["| valkey-9.1 | 2 | 3 | 1 450 | 3 | 1 |"]
    assert banked([Result("nap", "valkey-9.1", 1, "clean")]) == []


def test_the_bank_finds_what_does_not_count_once() -> None:
    """Missing, doubled and unexpected bookings, and receipts; what a fault excuses is not one."""
    one, two, lost = ("a", 0), ("a", 1), ("a", 2)
    history = History(stored={one, two})
    assert unsound(history, Counter([one, two]), Counter([one, two])) == []
    assert unsound(history, Counter([one]), Counter([one])) == ["('a', 1) is booked 0 times"]
    assert unsound(history, Counter([one, two, two]), Counter([one, two, two])) == ["('a', 1) is booked 2 times"]
    assert unsound(history, Counter([one, two, lost]), Counter([one, two, lost])) == ["('a', 2) is booked 1 times"]
    assert unsound(history, Counter([one, two]), Counter([one])) == ["('a', 1) is booked 1 times and has 0 receipts"]
    assert len(unsound(history, Counter([one, two]), Counter([one, one, two]))) == 1
    forgiven = History(stored={one, two}, given_up={two: "the server has forgotten it"}, rewound="the power was lost")
    assert unsound(forgiven, Counter([one]), Counter()) == []
    assert unsound(forgiven, Counter([one, one]), Counter()) == ["('a', 0) is booked 2 times"]
    assert unsound(History(stored={one}, rewound="the group was reset"), Counter([one, one, one]), Counter()) == []
