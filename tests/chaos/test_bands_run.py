"""The verdict of a run with bands, and a small run."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from tests.chaos.bands_run import IN_DOUBT, RESIZE_SECONDS, SIZES, STILL, Stillness, doubt, judge, main


def test_a_verdict_counts_what_is_lost_doubled_and_out_of_order() -> None:
    """By worker, key and number; what a killed worker had may come again."""
    sent = array("l", [3, 2])
    good = judge(iter([(0, 0, 0), (1, 1, 0), (0, 0, 1), (1, 0, 2), (1, 1, 1)]), sent, set())
    assert (good.is_good, good.messages) == (True, 5)
    bad = judge(iter([(0, 0, 0), (1, 0, 0), (0, 0, 2), (0, 0, 1), (0, 1, 0)]), sent, set())
    assert (bad.lost, bad.doubled, bad.reordered, bad.is_good) == (1, 1, 1, False)
    killed = judge(iter([(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (1, 0, 2), (1, 1, 0), (1, 1, 1)]), sent, {0})
    assert (killed.is_good, killed.again) == (True, 2)


def test_after_a_lost_master_only_what_was_handled_shortly_before_may_come_again() -> None:
    """And only what no replica has confirmed may be lost."""
    losses, sent = [(100.0, 103.0)], array("l", [3])
    assert [doubt(7, at, losses) for at in (90.0, 99.0, 102.0, 104.0, 110.0)] == [7, IN_DOUBT, IN_DOUBT, IN_DOUBT, 7]
    records = [(0, 0, 0), (IN_DOUBT, 0, 1), (1, 0, 1)]
    good = judge(iter(records), sent, {IN_DOUBT}, {(0, 2)})
    assert (good.is_good, good.again) == (True, 1)
    bad = judge(iter([*records, (1, 0, 0)]), sent, {IN_DOUBT}, {(0, 1)})
    assert (bad.lost, bad.doubled) == (1, 1)


def test_a_run_is_given_up_when_nothing_changes_or_a_resize_does_not_end() -> None:
    """Not before, and not while what is handled, or which resize it is, changes."""
    still = Stillness(0.0)
    assert not still.look(STILL, (1, 0), 0, is_resizing=False)
    assert not still.look(2 * STILL, (1, 0), 0, is_resizing=False)
    assert "nothing was handled" in still.look(2 * STILL + 1, (1, 0), 0, is_resizing=False)
    still, end = Stillness(0.0), int(RESIZE_SECONDS)
    seen = [still.look(float(second), (second,), 0, is_resizing=True) for second in range(end + 1)]
    assert not any(seen)
    assert "has not ended" in still.look(end + 1.0, (end + 1,), 0, is_resizing=True)
    assert not still.look(end + 2.0, (end + 2,), 1, is_resizing=True)
    assert not still.look(end + 3.0, (end + 3,), 1, is_resizing=False)


@pytest.mark.long_chaos("half a minute")
async def test_a_topic_that_is_resized_while_masters_are_lost_loses_and_reorders_nothing(tmp_path: Path) -> None:
    """The small form of `python -m tests.chaos.bands_run --resize --sentinel`, with a kill."""
    verdict = await main(6000, 1, 1, tmp_path, SIZES, on_sentinel=True)
    assert verdict.is_good, f"{verdict} {verdict.examples[:5]}"
    assert verdict.failovers


async def test_a_topic_with_bands_that_is_resized_while_workers_run_loses_and_reorders_nothing(tmp_path: Path) -> None:
    """The small form of `python -m tests.chaos.bands_run --resize`, with a kill."""
    verdict = await main(6000, 1, 1, tmp_path, SIZES)
    assert verdict.is_good, f"{verdict} {verdict.examples[:5]}"


async def test_bands_that_are_added_while_workers_run_lose_and_reorder_nothing(tmp_path: Path) -> None:
    """The small form of `python -m tests.chaos.bands_run`, with a kill."""
    verdict = await main(6000, 1, 1, tmp_path)
    assert verdict.is_good, f"{verdict} {verdict.examples[:5]}"
