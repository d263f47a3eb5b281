"""The assignment is complete, disjoint, balanced, the same for every member, and moves few partitions."""

from __future__ import annotations

import hashlib
import json
import sys
from math import isqrt

import mmh3
from hypothesis import given
from hypothesis import strategies as st

from rsmq.heartbeat.assignment import assign, quotas

MEMBERS = st.lists(st.uuids().map(str), min_size=1, max_size=12, unique=True)
PARTITIONS = st.integers(1, 64)


@given(PARTITIONS, MEMBERS)
def test_every_partition_has_one_owner_and_loads_differ_by_at_most_one(partitions: int, members: list[str]) -> None:
    """The assignment is complete and balanced."""
    owners = assign(partitions, members)
    assert sorted(owners) == list(range(partitions))
    loads = [list(owners.values()).count(member) for member in members]
    assert max(loads) - min(loads) <= 1


@given(PARTITIONS, MEMBERS, st.randoms(use_true_random=False))
def test_assignment_does_not_depend_on_the_order_of_members(
    partitions: int, members: list[str], random: object
) -> None:
    """Every member computes the same owners."""
    shuffled = list(members)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert assign(partitions, shuffled) == assign(partitions, members)


@given(PARTITIONS, MEMBERS)
def test_assignment_after_a_leave_moves_few_partitions(partitions: int, members: list[str]) -> None:
    """The partitions of the member that left must move. The load bound moves about two more for each member, and as
    many as loads differ by chance without it."""
    if len(members) < 2:
        return
    before, after = assign(partitions, members), assign(partitions, members[1:])
    had = sum(owner == members[0] for owner in before.values())
    moved = sum(before[partition] != after[partition] for partition in before)
    assert moved <= had + 2 * len(members) + isqrt(partitions)


@given(PARTITIONS, st.dictionaries(st.uuids().map(str), st.floats(0.1, 10), min_size=1, max_size=8))
def test_assignment_with_weights_gives_each_member_its_share(partitions: int, weights: dict[str, float]) -> None:
    """The share is rounded up or down."""
    owners = assign(partitions, weights)
    total = sum(weights.values())
    assert len(owners) == partitions
    for member, weight in weights.items():
        assert abs(list(owners.values()).count(member) - partitions * weight / total) < 1 + 1e-6


@given(PARTITIONS, MEMBERS, st.data())
def test_partition_goes_to_a_member_that_can_read_it(partitions: int, members: list[str], data: st.DataObject) -> None:
    """If there is one. Each has one owner all the same, and what all can read fills up the shares."""
    some = st.frozensets(st.integers(0, partitions - 1))
    unreadable = data.draw(st.dictionaries(st.sampled_from(members), some))
    owners = assign(partitions, members, "t/g", unreadable)
    assert sorted(owners) == list(range(partitions))
    for partition, owner in owners.items():
        able = {member for member in members if partition not in unreadable.get(member, ())}
        assert owner in able or not able
    barred = len(frozenset().union(*unreadable.values()))
    assert max(list(owners.values()).count(member) for member in members) <= -(-partitions // len(members)) + barred


def test_member_that_cannot_read_some_partitions_has_its_share_of_the_others() -> None:
    """The loads differ by at most one, where that is possible."""
    owners = assign(8, ["a", "b"], "t/g", {"a": frozenset({0, 1, 2})})
    assert [owners[number] for number in range(3)] == ["b"] * 3
    assert sorted(owners.values()) == ["a"] * 4 + ["b"] * 4
    assert assign(8, ["a", "b"], "t/g", {"a": frozenset()}) == assign(8, ["a", "b"], "t/g")


def test_assignment_without_members_is_empty() -> None:
    """No error is raised."""
    assert assign(8, []) == {}


def test_quotas_of_equal_weights_add_up_to_all_partitions() -> None:
    """The largest remainders get the partitions that are left over."""
    assert sum(quotas(7, {"a": 1.0, "b": 1.0, "c": 1.0}).values()) == 7


def test_assignment_is_frozen() -> None:
    """Members of two versions that compute different owners leave partitions without any. These never change."""
    by_number = [owner for _, owner in sorted(assign(8, ["a", "b", "c"], "orders/billing").items())]
    assert by_number == ["c", "c", "b", "a", "b", "b", "c", "a"]
    weighted = assign(16, {"a": 1.0, "b": 2.0}, "t/g")
    assert {partition for partition, owner in weighted.items() if owner == "a"} == {2, 4, 9, 10, 11}
    barred = assign(8, ["a", "b", "c"], "t/g", {"a": frozenset({0, 1, 2})})
    assert [owner for _, owner in sorted(barred.items())] == ["b", "c", "c", "a", "a", "b", "b", "a"]
    large = assign(1024, [f"m{number}" for number in range(1000)], "t/g")
    digest = hashlib.sha256(json.dumps(sorted(large.items())).encode()).hexdigest()
    assert digest.startswith("995d1976a73fde0b")


@given(PARTITIONS, MEMBERS)
def test_assignment_is_that_of_all_pairs_by_their_scores(partitions: int, members: list[str]) -> None:
    """Only a few pairs are compared, and the owners are those of the full comparison."""
    room, owners = quotas(partitions, dict.fromkeys(members, 1.0), "t/g"), dict[int, str]()
    scores = {member: hashlib.shake_128(f"t/g/{member}".encode()).digest(partitions) for member in members}
    pairs = [
        (scores[member][partition], mmh3.hash64(f"t/g/{member}/{partition}", signed=False)[0], partition, member)
        for member in members for partition in range(partitions)
    ]  # fmt: skip
    for _, _, partition, member in sorted(pairs, reverse=True):
        if partition not in owners and room[member]:
            owners[partition] = member
            room[member] -= 1
    assert assign(partitions, members, "t/g") == owners


def test_assignment_of_a_thousand_members_compares_few_pairs() -> None:
    """Of a million pairs; and one that leaves moves few partitions besides its own."""
    hashes = 0

    def count(_frame: object, event: str, function: object) -> None:
        nonlocal hashes
        hashes += event == "c_call" and function is mmh3.hash64

    members = [f"host-{number}" for number in range(1000)]
    sys.setprofile(count)
    try:
        before = assign(1024, members, "t/g")
    finally:
        sys.setprofile(None)
    assert 1024 <= hashes <= 10 * 1024
    after = assign(1024, members[1:], "t/g")
    assert sum(before[partition] != after[partition] for partition in before) <= 12


def test_partitions_that_do_not_exist_are_no_partitions() -> None:
    """Another client may have written any numbers."""
    assert assign(2, ["a", "b"], "t/g", {"a": frozenset({7})}) == assign(2, ["a", "b"], "t/g")
