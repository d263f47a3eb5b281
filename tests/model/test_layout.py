"""Layouts: blocks of partitions, bands, and what is read from the server."""

from __future__ import annotations

import json
import sys

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
    stored = layout.stored.encode() or None
    read = read_layout("t", str(partitions).encode(), stored)
    assert (read, read.stored, read.numbers) == (layout, layout.stored, layout.numbers)


@given(common=st.lists(BANDS, max_size=2), known=st.lists(BANDS, max_size=3), found=st.lists(BANDS, max_size=3))
def test_a_lost_layout_comes_back_beside_what_was_added_meanwhile(
    common: list[list[str]], known: list[list[str]], found: list[list[str]]
) -> None:
    """Two layouts that were made of one: all blocks in use of both are there, no number has two bands, none two blocks,
    and members of both follow."""

    def changed(layout: Layout, changes: list[list[str]], *, opens: bool) -> Layout:
        for bands in changes:
            layout = layout.with_bands(bands)
            layout = layout.opened() if layout.waits and opens else layout
        return layout

    before = changed(single(2), common, opens=True)
    theirs, stored = changed(before, known, opens=True), changed(before, found, opens=False)
    both = stored.with_lost(theirs)
    assert len(both.numbers) == 2 * len(both.blocks)
    for block in stored.blocks:
        if block.state == "open":
            assert both.band_of(block.first) == block.band
    for block in theirs.blocks:
        used = [each for each in stored.blocks if each.state != "added" and block.first in each.numbers]
        if block.state != "added" and not used:
            assert both.band_of(block.first) == block.band
        assert both.block_of(block.band) is not None
    assert both == theirs or {*stored.bands} <= {*both.bands}
    assert all(both.block_of(band) is not None for band in both.bands)
    assert both.with_lost(theirs) is both.with_lost(stored) is both
    assert stored == theirs or both.version >= max(stored.version, theirs.version)
    assert not both.is_known_by(theirs.known_as) or {*theirs.numbers} == {*both.numbers}


def test_a_topic_without_bands_stores_no_layout() -> None:
    """It is one block from 0 on, with nothing in its hash."""
    layout = read_layout("orders", b"8", None)
    assert (layout.numbers, layout.stored, layout.version, layout.has_bands) == (tuple(range(8)), "", 0, False)
    assert made_with(8, ()) == single(8)


def test_numbers_in_use_that_no_band_has_are_read_and_given_to_none() -> None:
    """They had a band that the server has lost. A new one gets the numbers after them."""
    layout = single(2).with_bands(("normal", "bulk"), used={3, 5})
    assert layout.numbers == tuple(range(8))
    assert [(block.first, block.band, block.state) for block in layout.blocks[1:]] == [
        (2, "lost-2", "closed"), (4, "lost-4", "closed"), (6, "bulk", "added"),
    ]  # fmt: skip
    assert layout.bands == ("normal", "bulk")
    assert read_layout("t", b"2", layout.stored.encode()) == layout


def test_bands_of_a_new_topic_are_open_at_once() -> None:
    """No member has to know them before; those that are added later wait."""
    made = made_with(2, ("urgent", "normal"))
    assert (made.waits, made.numbers, made.normal.numbers) == (False, (0, 1, 2, 3), range(2))
    more = made.with_more(("normal", "bulk"))
    assert (more.bands, more.waits) == (("normal", "bulk", "urgent"), True)
    assert more.with_more(("bulk",)) is more


def test_each_band_grows_by_itself() -> None:
    """A partition is followed in its band; a closed band has what it had, and is opened again where it was last."""
    before = made_with(2, ("urgent", "normal", "bulk")).with_bands(("urgent", "normal"))
    added = before.with_partitions(6)
    assert added.to_seal == [2, 3, 0, 1]
    assert [(each.first, each.band, each.parent) for each in added.all_following] == [
        (6, "urgent", 2), (12, "normal", 0),
    ]  # fmt: skip
    assert [each.state for each in added.without_following().blocks[-2:]] == ["closed", "closed"]
    done = added.sealed()
    assert (done.following, done.sealed_numbers, done.block_of("bulk")) == (None, {0, 1, 2, 3}, before.block_of("bulk"))
    for number, after in ((3, range(6, 12)), (1, range(12, 18))):
        assert {done.partition_after(number, f"k{n}") for n in range(50)} == {*after[1::2]}
    assert done.partition_after(4, "k") == before.block_of("bulk").partition_for("k")
    closed = done.with_bands(("normal",))
    assert (closed.sealed_numbers, closed.following) == (done.sealed_numbers, None)
    again = closed.with_bands(("urgent", "normal", "new"))
    assert [(each.first, each.count) for each in again.blocks if each.state == "added"] == [(6, 6), (18, 6)]
    assert (again.following, again.opened().block_of("urgent").first) == (None, 6)
    with pytest.raises(ConfigError, match="not open yet"):
        again.with_partitions(12)
    with pytest.raises(ConfigError, match="is being resized"):
        added.with_bands(("normal",))
    given_up = done.with_partitions(12).without_following().with_bands(("normal",))
    assert given_up.with_bands(("urgent", "normal")).block_of("urgent").first == 6


def test_numbers_that_were_chosen_are_read_again_and_by_no_older_version() -> None:
    """On a cluster: their key, their owner and what they follow go by their position."""
    before = single(2)
    added = before.with_partitions(4, lambda parents, count, first: (900, 70_001, 80, 5))
    assert before.with_partitions(4).stored.startswith('{"format": 1,')
    assert added.stored.startswith('{"format": 2,')
    opening = added.opening()
    assert (added.is_opening, opening.is_opening, opening.waits, opening.sealed().waits) == (False, True, True, False)
    assert [opening.is_being_sealed(number) for number in (0, 900)] == [True, False]
    assert [opening.is_used(number) for number in (1, 900, 7)] == [True, False, False]
    done = opening.sealed()
    for layout in (added, opening, done):
        assert read_layout("t", layout.partitions.encode(), layout.stored.encode()) == layout
    assert done.numbers == (0, 1, 5, 80, 900, 70_001)
    assert [done.ancestors_of(number) for number in (900, 70_001, 80, 5)] == [[0], [1], [0], [1]]
    assert [each.first for each in done.before_current] == [0]
    assert {done.current.partition_for(f"k{n}") for n in range(50)} == {900, 70_001, 80, 5}
    assert {done.partition_after(1, f"k{n}") for n in range(50)} == {70_001, 5}
    assert min(done.with_partitions(8).all_following[0].numbers) == 70_002


def test_what_follows_a_partition_is_found_without_a_look_at_all_others() -> None:
    """On a cluster a resize asks for it partition by partition, while publishers wait: with 512 it took 40 ms each."""

    def calls(partitions: int) -> int:
        layout, seen = single(partitions).with_partitions(2 * partitions).sealed(), list[str]()
        sys.setprofile(lambda _frame, event, _arg: seen.append(event))
        try:
            assert layout.descendants_of(1) == [partitions + 1, 2 * partitions + 1]
        finally:
            sys.setprofile(None)
        return seen.count("call")

    assert calls(512) == calls(8)


@given(
    partitions=st.integers(1, 3),
    steps=st.lists(st.tuples(st.integers(2, 3), st.booleans(), st.booleans()), max_size=4),
    bands=st.sampled_from([(), ("urgent", "normal")]),
)
def test_what_follows_a_partition_is_what_has_it_before(
    partitions: int, steps: list[tuple[int, bool, bool]], bands: tuple[str, ...]
) -> None:
    """After each resize, also one that was given up, with bands and with numbers that were chosen."""

    def choose(parents: tuple[int, ...], count: int, first: int) -> tuple[int, ...]:
        return tuple(first + 7 * (count - index) + parents[index % len(parents)] % 7 for index in range(count))

    layout = made_with(partitions, bands)
    for times, is_given_up, is_chosen in steps:
        layout = layout.with_partitions(times * layout.current.count, choose if is_chosen else None)
        layout = layout.without_following() if is_given_up else layout.sealed()
    for number in layout.numbers:
        after = [each for each in layout.numbers if number in layout.ancestors_of(each)]
        assert layout.descendants_of(number) == after


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
