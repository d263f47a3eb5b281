"""What the inspector, `rsmq top` and the exporter show of the bands of a topic."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from rich.console import Console

from rsmq.cli.top_screen import draw
from rsmq.inspector.scale import load_of
from rsmq.inspector.state import band_states
from rsmq.inspector.trend import compare
from rsmq.model.layout import made_with, single
from rsmq.telemetry.exporter import of_group
from tests.inspector.states import MEMBER, PART, snapshot

LAYOUT = made_with(1, ("urgent", "normal"))


def test_a_group_is_shown_by_band() -> None:
    """Its partitions are summed, the highest band first; a topic without bands shows none."""
    shares = (PART, replace(PART, partition=1, unread=7, pending=1, oldest=None, dead_letters=0))
    assert band_states(single(2), shares) == ()
    urgent, normal = band_states(LAYOUT, shares)
    assert (urgent.name, urgent.partitions, urgent.unread, urgent.pending, urgent.oldest) == ("urgent", 1, 7, 1, None)
    assert (normal.name, normal.unread, normal.oldest, normal.dead_letters) == ("normal", 100, timedelta(seconds=9), 1)


def test_bands_are_in_the_metrics_and_bound_no_workers_twice() -> None:
    """A member more than the partitions of one band would own none: those that belong together have one owner."""
    shares = (PART, replace(PART, partition=1, unread=7))
    taken = snapshot(1.0, *shares)
    group = replace(taken.groups[0], bands=band_states(LAYOUT, shares))
    samples = {(each.metric.name, each.labels[-1]): each.value for each in of_group(group, [MEMBER])}
    assert samples["rsmq_band_backlog_messages", "urgent"] == 15
    assert samples["rsmq_band_oldest_seconds", "normal"] == 9
    board = compare(None, replace(taken, groups=(group,)))
    assert load_of(None, board.groups[0]).partitions == 1
    console = Console(width=160, record=True)
    console.print(draw(board, "rsmq", with_partitions=False))
    assert "urgent" in console.export_text()
