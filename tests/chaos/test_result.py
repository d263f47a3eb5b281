"""The page of results."""

from __future__ import annotations

from tests.chaos.result import Result, added_up


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
