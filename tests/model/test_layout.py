"""Layouts: blocks of partitions, bands, and what is read from the server."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq.errors import ConfigError
from rsmq.model.layout import (
    FORMAT,
    Layout,
    checked_bands,
    made_with,
    plain_distribution,
    read_layout,
    single,
    stored_distribution,
)

BANDS = st.lists(st.sampled_from(["urgent", "bulk", "later", "now"]), unique=True, max_size=4).flatmap(
    lambda others: st.permutations(["normal", *others])
)


@given(partitions=st.integers(1, 9), changes=st.lists(BANDS, max_size=6))
def test_bands_that_change_never_use_a_number_twice(partitions: int, changes: list[list[str]]) -> None:
    """In each order of changes: a block keeps its numbers, all are different, and the text reads as it was."""
    layout = single(partitions)
    for bands in changes:
        before = layout
        layout = layout.with_bands(bands)
        layout = layout.opened() if layout.waits else layout
        assert layout.bands == tuple(bands)
        assert [block.first for block in before.blocks] == [
            block.first for block in layout.blocks[: len(before.blocks)]
        ]
        assert len(layout.numbers) == len(set(layout.numbers)) == partitions * len(layout.blocks)
        assert {block.state for block in layout.blocks if block.band in bands} == {"open"}
        assert {block.state for block in layout.blocks if block.band not in bands} <= {"closed"}
        assert sorted(layout.owned_with(range(partitions))) == list(layout.numbers)
    stored = layout.stored.encode() or None
    read = read_layout("t", str(partitions).encode(), stored)
    assert (read, read.stored, read.numbers) == (layout, layout.stored, layout.numbers)


def test_a_topic_without_bands_stores_no_layout() -> None:
    """It is one block from 0 on, with nothing in its hash."""
    layout = read_layout("orders", b"8", None)
    assert (layout.numbers, layout.stored, layout.version, layout.has_bands) == (tuple(range(8)), "", 0, False)
    assert made_with(8, ()) == single(8)


def test_bands_of_a_new_topic_are_open_at_once() -> None:
    """No member has to know them before; those that are added later wait."""
    made = made_with(2, ("urgent", "normal"))
    assert (made.waits, made.numbers, made.normal.numbers) == (False, (0, 1, 2, 3), range(2))
    more = made.with_more(("normal", "bulk"))
    assert (more.bands, more.waits) == (("normal", "bulk", "urgent"), True)
    assert more.with_more(("bulk",)) is more


@pytest.mark.parametrize(
    ("partitions", "layout", "text"),
    [
        (b"resized, see layout", None, "a newer version of rsmq has changed it"),
        (b"-1", None, "instead of a number"),
        (b"8", json.dumps({"format": FORMAT + 1}).encode(), "upgrade this process"),
        (b"8", b"[]", "is not as rsmq has written it"),
        (b"8", b"\xff\xfe", "is not as rsmq has written it"),
        (b"8", json.dumps({"format": 1, "version": 1, "bands": ["normal"], "blocks": [{}]}).encode(), "not as rsmq"),
        (b"8", json.dumps({"format": 1, "version": 1, "bands": [], "blocks": 1}).encode(), "not as rsmq"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_sentence(partitions: bytes, layout: bytes | None, text: str) -> None:
    """A process that does not know what the partitions are stops."""
    with pytest.raises(ConfigError, match=text):
        read_layout("orders", partitions, layout)


@pytest.mark.parametrize("bands", [(), "normal", ("urgent",), ("normal", "normal"), ("normal", "Ä"), ("normal", 1)])
def test_bands_that_are_not_possible_are_refused(bands: tuple[str, ...]) -> None:
    """The error says what to write."""
    with pytest.raises(ConfigError, match="bands="):
        checked_bands(bands)


def test_a_group_of_a_topic_with_bands_is_refused_by_who_knows_none() -> None:
    """Its distribution is a word that an older worker compares with its own."""
    with_bands = Layout(made_with(1, ("normal", "bulk")).blocks)
    assert stored_distribution("hash", single(1)) == "hash"
    assert (
        plain_distribution(stored_distribution("hash", with_bands)) == "hash" != stored_distribution("hash", with_bands)
    )
