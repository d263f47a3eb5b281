"""Offsets: the same text for the same position, exact differences, fair shares of a limit. No server is needed."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq.pipeline.format.offsets import DataLoss, Offsets, Position, Range, ranges_between, split_limit

STREAMS = st.tuples(st.sampled_from(["a", "b", "a.1"]), st.integers(0, 12))
POSITIONS = st.builds(Position, st.just("5-1"), st.integers(0, 10**12), st.integers(0, 3))


def offsets(*added: int, epoch: int = 1, since: int = 0) -> Offsets:
    """Offsets of topic `orders`, a partition for each count."""
    positions = {("orders", number): Position(f"{count}-0", count, since) for number, count in enumerate(added)}
    return Offsets({"orders": epoch}, positions)


@given(st.dictionaries(STREAMS, POSITIONS))
def test_offsets_survive_json(positions: dict[tuple[str, int], Position]) -> None:
    """What the checkpoint holds is what was there, and text does not depend on the order of anything."""
    epochs = {topic: 7 for topic, _ in positions}
    there = Offsets(epochs, positions)
    text = json.dumps(there.to_json())
    assert Offsets.from_json(json.loads(text)) == there
    turned = Offsets(dict(reversed(epochs.items())), dict(reversed(positions.items())))
    assert json.dumps(turned.to_json()) == text


def test_offsets_as_json_have_a_fixed_form() -> None:
    """People read checkpoints, and other programs do."""
    assert json.dumps(offsets(5, 0).to_json()) == (
        '{"orders": {"0": {"added": 5, "id": "5-0"}, "1": {"added": 0, "id": "0-0"}, "epoch": 1}}'
    )


def test_ranges_lie_between_offsets() -> None:
    """One for each stream that has got entries, with how many."""
    assert ranges_between(offsets(5, 7), offsets(5, 9), is_strict=True) == [Range("orders", 1, "7-0", "9-0", 2)]


def test_a_stream_that_is_new_is_read_from_where_it_was_first_seen() -> None:
    """Entries lost before the query first saw the stream are not expected."""
    assert ranges_between(Offsets({}, {}), offsets(9, since=4), is_strict=True) == [Range("orders", 0, "0-0", "9-0", 5)]


@pytest.mark.parametrize("after", [offsets(9, epoch=2), offsets(3)])
def test_a_recreated_topic_is_data_loss(after: Offsets) -> None:
    """By its epoch or by a count that has fallen: an error with both counts, or its beginning."""
    with pytest.raises(
        DataLoss, match=r"orders\.0 was deleted and created again: 5 entries .* the new one has had [93]"
    ):
        ranges_between(offsets(5), after, is_strict=True)
    (again,) = ranges_between(offsets(5), after, is_strict=False)
    assert (again.start, again.expected) == ("0-0", after.positions["orders", 0].added)


def test_a_range_is_checked_exactly(caplog: pytest.LogCaptureFixture) -> None:
    """Fewer and more than promised are errors, with the counts; without strictness they are logged."""
    whole = Range("orders", 0, "1-0", "9-0", 100)
    whole.check(100)
    with pytest.raises(DataLoss, match="expected 100, found 50: trimmed before read"):
        whole.check(50)
    with pytest.raises(DataLoss, match="expected 100, found 101: the stream was created again or restored"):
        whole.check(101)
    with caplog.at_level(logging.WARNING):
        Range("orders", 0, "1-0", "9-0", 100, is_strict=False).check(50)
    assert "expected 100, found 50" in caplog.text


@given(st.dictionaries(STREAMS, st.integers(0, 10**9), min_size=1), st.integers(1, 10**9))
def test_split_limit_is_exact_and_fair(backlogs: dict[tuple[str, int], int], limit: int) -> None:
    """In sum as many as allowed, from no stream more than it has, and within one of its proportion."""
    split = split_limit(backlogs, limit)
    total = sum(backlogs.values())
    assert sum(split.values()) == min(limit, total)
    for stream, backlog in backlogs.items():
        assert split[stream] <= backlog
        if total > limit:
            assert abs(split[stream] - limit * backlog / total) <= 1
