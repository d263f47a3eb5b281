"""The verdict of a run of notifications, and a small run."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.notifications_run import channel_of, judge, main

# person 0 gets three notifications, the others one
GOOD = [(0, person, 0, channel_of(person, 0)) for person in range(4)] + [(0, 0, at, channel_of(0, at)) for at in (1, 2)]


def test_a_verdict_counts_what_no_kill_explains() -> None:
    """Lost, doubled, out of order in a channel, and another channel than the drawn one."""
    assert None not in {channel for *_, channel in GOOD}
    good = judge(GOOD, 4, (), ())
    assert (good.is_good, good.notifications, good.by.total()) == (True, 6, 6)
    assert not judge(GOOD[1:], 4, (), ()).is_good
    assert judge(GOOD[1:], 4, (), ()).lost == 1
    assert judge([*GOOD, GOOD[0]], 4, (), ()).doubled == 1
    turned = [(0, 0, number, 0) for number in (1, 0, 2)]
    assert judge([*GOOD[1:4], *turned], 4, (), ()).reordered == 1
    elsewhere = [*GOOD[1:], (0, 0, 0, 1 - GOOD[0][3])]
    assert (judge(elsewhere, 4, (), ()).elsewhere, judge(elsewhere, 4, (), ()).is_good) == (1, False)
    assert judge(GOOD, 4, (), {(0, 0)}).doubled == 1, "sent, and a dead letter"


def test_what_a_killed_worker_had_may_be_sent_again() -> None:
    """By the same channel, by another one, or it becomes a dead letter. Of a live one nothing may come again."""
    channel = GOOD[0][3]
    again = judge([*GOOD, (1, 0, 0, channel)], 4, {0}, ())
    assert (again.is_good, again.again, again.by_two) == (True, 1, 0)
    two = judge([*GOOD, (1, 0, 0, 2)], 4, {0}, ())
    assert (two.is_good, two.by_two, two.elsewhere) == (True, 1, 1)
    dead = judge(GOOD, 4, {0}, {(0, 0)})
    assert (dead.is_good, dead.also_dead) == (True, 1)
    assert not judge([*GOOD, (1, 0, 0, channel), (2, 0, 0, channel)], 4, {0}, ()).is_good


async def test_each_notification_is_sent_once_unless_a_killed_worker_had_it(tmp_path: Path) -> None:
    """The small form of `python -m tests.chaos.notifications_run`, with a kill; each one has a line in the ledger."""
    ledger = tmp_path / "ledger"
    verdict = await main(300, 1, workers=1, keep=tmp_path, ledger=ledger)
    assert verdict.is_good, f"{verdict} {verdict.examples[:5]}"
    assert verdict.kills == 1
    assert len(ledger.read_text().splitlines()) == verdict.notifications == 360
