"""Filters and the tree of filters, against each other."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsmq.gateway.fleet.filter_tree import FilterTree
from rsmq.gateway.protocol.topic_filter import covers, is_valid_filter, matches


@pytest.mark.parametrize(
    ("pattern", "name", "wanted"),
    [
        ("a/b", "a/b", True), ("a/b", "a/B", False), ("a/+", "a/b", True), ("a/+", "a/", True), ("a/+", "a", False),
        ("a/#", "a", True), ("a/#", "a/b/c", True), ("#", "a/b", True), ("+/+", "/a", True), ("/+", "/a", True),
        ("+", "/a", False), ("+/b/#", "a/b", True), ("a//b", "a//b", True), ("a/+/b", "a//b", True),
    ],
)  # fmt: skip
def test_a_filter_matches_by_levels(pattern: str, name: str, wanted: bool) -> None:
    assert matches(pattern, name) is wanted


def test_wildcards_in_the_first_level_do_not_match_system_topics() -> None:
    assert not matches("#", "$SYS/x")
    assert not matches("+/x", "$SYS/x")
    assert matches("$SYS/#", "$SYS/x")
    assert matches("$SYS/+", "$SYS/x")
    tree: FilterTree[str, int] = FilterTree()
    for pattern in ("#", "+/x", "$SYS/#", "$SYS/x"):
        tree.put(pattern, pattern, 1)
    assert {key for key, _ in tree.match("$SYS/x")} == {"$SYS/#", "$SYS/x"}


levels = st.sampled_from(["a", "b", "c", "", "$x"])
names = st.lists(levels, min_size=1, max_size=4).map("/".join).filter(bool)
filters = (
    st.lists(levels | st.just("+"), max_size=4)
    .flatmap(lambda found: st.sampled_from([found, [*found, "#"]]))
    .map("/".join)
    .filter(is_valid_filter)
)


@settings(max_examples=150)
@given(st.lists(filters, max_size=12), st.lists(names, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_the_tree_finds_what_matches(patterns: list[str], found: list[str], rng: random.Random) -> None:
    tree: FilterTree[int, str] = FilterTree()
    alive = dict(enumerate(patterns))
    for key, pattern in alive.items():
        tree.put(pattern, key, pattern)
    for key in rng.sample(sorted(alive), len(alive) // 2):
        tree.remove(alive.pop(key), key)
    assert tree.size == len(alive)
    for name in found:
        assert sorted(tree.match(name)) == sorted(
            (key, pattern) for key, pattern in alive.items() if matches(pattern, name)
        )
    for key, pattern in alive.items():
        tree.remove(pattern, key)
    assert tree.size == 0
    assert tree._root.is_empty
    assert not tree._exact


@settings(max_examples=150)
@given(filters, filters, names)
def test_a_filter_that_covers_another_matches_all_of_it(wide: str, narrow: str, name: str) -> None:
    if covers(wide, narrow) and matches(narrow, name):
        assert matches(wide, name)
    assert covers(wide, wide) or wide.startswith("$")
