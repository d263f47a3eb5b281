"""The assignment is complete, disjoint, balanced, the same for everybody, and moves little."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rsmq.heartbeat.assignment import assign, quotas

MEMBERS = st.lists(st.uuids().map(str), min_size=1, max_size=12, unique=True)
PARTITIONS = st.integers(1, 64)


@given(PARTITIONS, MEMBERS)
def test_every_partition_has_one_owner_and_loads_differ_by_at_most_one(partitions: int, members: list[str]) -> None:
    """Complete and balanced."""
    owners = assign(partitions, members)
    assert sorted(owners) == list(range(partitions))
    loads = [list(owners.values()).count(member) for member in members]
    assert max(loads) - min(loads) <= 1


@given(PARTITIONS, MEMBERS, st.randoms(use_true_random=False))
def test_everybody_computes_the_same(partitions: int, members: list[str], random: object) -> None:
    """The order in which members are seen does not matter."""
    shuffled = list(members)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert assign(partitions, shuffled) == assign(partitions, members)


@given(PARTITIONS, MEMBERS)
def test_a_leave_moves_little(partitions: int, members: list[str]) -> None:
    """What the leaver had must move; beyond that the load bound moves at most one partition a member."""
    if len(members) < 2:
        return
    before, after = assign(partitions, members), assign(partitions, members[1:])
    had = sum(owner == members[0] for owner in before.values())
    moved = sum(before[partition] != after[partition] for partition in before)
    assert moved <= had + 2 * len(members)


@given(PARTITIONS, st.dictionaries(st.uuids().map(str), st.floats(0.1, 10), min_size=1, max_size=8))
def test_weights_are_followed(partitions: int, weights: dict[str, float]) -> None:
    """Each member gets its share, rounded up or down."""
    owners = assign(partitions, weights)
    total = sum(weights.values())
    assert len(owners) == partitions
    for member, weight in weights.items():
        assert abs(list(owners.values()).count(member) - partitions * weight / total) < 1 + 1e-6


def test_nobody_owns_nothing() -> None:
    """Without members there are no owners, and nothing fails."""
    assert assign(8, []) == {}


def test_quotas_add_up() -> None:
    """Largest remainders leave nothing over."""
    assert sum(quotas(7, {"a": 1.0, "b": 1.0, "c": 1.0}).values()) == 7


def test_what_one_caller_changes_no_other_sees() -> None:
    """The answer is remembered, and every caller gets a copy."""
    assign(8, ["a", "b"]).clear()
    assert len(assign(8, ["b", "a"])) == 8
