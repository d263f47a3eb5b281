"""Which partitions have one owner while a group has not finished what was before a resize."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsmq.consumer.owning.families import Families
from rsmq.heartbeat.assignment import assign
from rsmq.model.layout import Layout, single

MEMBERS = ("a", "b", "c")


def grown(*counts: int, bands: tuple[str, ...] = ("normal",)) -> Layout:
    """A topic that has had so many partitions, one number after the other."""
    layout = single(counts[0]).with_bands(bands)
    layout = layout.opened() if layout.waits else layout
    for count in counts[1:]:
        layout = layout.with_partitions(count).sealed()
    return layout


def owners(families: Families, members: tuple[str, ...] = MEMBERS) -> dict[int, str]:
    """Of each partition. None has two."""
    found = [(number, member) for member in members for number in families.owned_by(member, members, "t/g", {})]
    assert len(found) == len(dict(found))
    return dict(found)


def test_a_topic_that_has_not_grown_has_the_owners_of_its_numbers() -> None:
    """And so has each band."""
    assert owners(Families(single(8))) == assign(8, MEMBERS, "t/g")
    found, first = owners(Families(grown(8, bands=("urgent", "normal")))), assign(8, MEMBERS, "t/g")
    assert found == {number: first[number % 8] for number in range(16)}


def test_a_resize_moves_no_partition_to_another_member() -> None:
    """What follows a partition is with its owner until the group has noted that it is finished. Then each is by itself,
    and the old one with the first of those that follow it."""
    before, layout = assign(4, MEMBERS, "t/g"), grown(4, 8)
    assert owners(Families(layout)) == {n: before[n % 4] for n in range(12)}
    after = assign(8, MEMBERS, "t/g")
    last = owners(Families(layout, b"8:2"))
    assert last == {n: before[2] if n % 4 == 2 else after[n % 4 if n < 4 else n - 4] for n in range(12)}
    done = owners(Families(layout, b"8:"))
    assert Counter(done[n] for n in range(4, 12)) == Counter(after.values())


@pytest.mark.parametrize(
    "note", [b"", b"8", b"x", b"8:,", b"8:1,", b"99999999999:", b"8:-1", b"8:1 ", b"\xff:1", b"4:7", b"8:1 x"]
)
def test_what_is_no_note_counts_as_none(note: bytes) -> None:
    """Another client may have written anything: then nothing is known to be finished."""
    assert Families(grown(4, 8), note).unfinished == {(4, at) for at in range(4)}


def test_a_second_resize_leaves_what_was_finished_before() -> None:
    """Only what it has sealed is not finished."""
    layout = grown(2, 4, 8)
    assert Families(layout).unfinished == {(2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)}
    assert Families(layout, b"4:").unfinished == {(4, 0), (4, 1), (4, 2), (4, 3)}
    families = Families(layout, b"8:1")
    assert (families.unfinished, [families.unit_of(at) for at in range(4)]) == (
        {(2, 1)}, [(8, 0), (2, 1), (8, 2), (2, 1)],
    )  # fmt: skip


def test_a_family_stays_with_an_owner_that_keeps_it() -> None:
    """As long as that lives, can read it, and it is not finished; another one may keep another family."""
    layout = grown(2, 4)
    families, other = Families(layout), {"a": "b", "b": "c", "c": "a"}
    name = other[owners(families)[0]]
    kept = families.kept_with(name, [4])  # it follows 0
    note = families.note(families.unfinished, kept)
    assert note == f"4:0,1 0={name}".encode()
    again = Families(layout, note)
    assert again.kept == {(2, 0): name}
    assert {owners(again)[each] for each in (0, 2, 4)} == {name}
    assert {each: owners(again)[each] for each in (1, 3, 5)} == {each: owners(families)[each] for each in (1, 3, 5)}
    rest = tuple(each for each in MEMBERS if each != name)
    assert owners(again, rest) == owners(families, rest)
    assert not again.owned_by(name, MEMBERS, "t/g", {name: frozenset({0, 2, 4})}) & {0, 2, 4}
    assert again.kept_with(name, []) == {}
    assert again.kept_with(other[name], [1]) == {(2, 0): name, (2, 1): other[name]}
    assert again.note({(2, 1)}, again.kept) == b"4:1"
    assert Families(layout, b"4:1 0=a").kept == {}
    assert families.kept_with("a name", [4]) == {}


def test_what_members_find_becomes_the_note() -> None:
    """A partition is finished when one that follows it follows nothing that is not; in vain, and it is not."""
    layout = grown(2, 4)
    families = Families(layout)
    assert families.found({}) == {(2, 0), (2, 1)}
    assert families.found({0: True, 1: True, 2: False}) == {(2, 0), (2, 1)}
    now = families.found({2: True, 3: False})
    assert families.note(now) == b"4:1"
    assert Families(layout, b"4:1").found({2: False}) == {(2, 0), (2, 1)}
    assert Families(layout, b"4:1").found({3: True, 5: False}) == {(2, 1)}
    assert Families(layout, b"4:").found({3: True, 5: True}) == frozenset()


def test_a_partition_is_finished_in_all_bands_or_in_none() -> None:
    """They have one owner."""
    layout = grown(1, 2, bands=("urgent", "normal"))
    follow = {band: layout.block_of(band).numbers[0] for band in ("urgent", "normal")}  # type: ignore[union-attr]
    families = Families(layout)
    assert families.found({follow["normal"]: True}) == {(1, 0)}
    assert families.found({follow["normal"]: True, follow["urgent"]: False}) == {(1, 0)}
    assert families.found({follow["normal"]: True, follow["urgent"]: True}) == frozenset()


@settings(max_examples=30)
@given(
    counts=st.sampled_from([(1, 2), (1, 16), (2, 4, 8), (3, 6, 18), (4, 8)]), bands=st.booleans(), data=st.data(),
    size=st.integers(1, 12),
)  # fmt: skip
def test_each_partition_has_one_owner_and_so_has_each_family(
    counts: tuple[int, ...], bands: bool, data: st.DataObject, size: int
) -> None:
    """Whatever is noted; and what is noted reads as it was."""
    layout = grown(*counts, bands=("urgent", "normal") if bands else ("normal",))
    every = sorted(Families(layout).unfinished)
    some = data.draw(st.sets(st.sampled_from(every)))
    note = Families(layout).note(some)
    families = Families(layout, note)
    assert families.unfinished == some
    found = owners(families, tuple(f"m{n}" for n in range(size)))
    assert found.keys() == {*layout.numbers}
    for count, at in some:
        (block,) = [each for each in layout.before_current if each.count == count]
        family = {block.numbers[at], *layout.descendants_of(block.numbers[at])}
        assert len({found[number] for number in family}) == 1


def test_a_member_that_cannot_read_a_partition_gets_no_family_of_it() -> None:
    """Those are in one slot of a cluster."""
    layout = grown(4, 8)
    for note in (b"", b"8:"):
        families = Families(layout, note)
        assert not families.owned_by("a", MEMBERS, "t/g", {"a": frozenset({1, 5, 9})}) & {1, 5, 9}
