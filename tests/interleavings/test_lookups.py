"""Routers that look up subscriptions while clients change them, and that each edit of the code behind it is found."""

from __future__ import annotations

import pytest

from tests.interleavings.bands import Edit
from tests.interleavings.lookups import LOOKUP_EDITS, Broken, histories

SEEDS = range(1, 31)
MOST = 400
"""Seeds until an edit is found."""
FINDS = {
    "a state after a failover is called as one before it": 150,
    "changes that the server has lost stay": 37,
    "names and tree are not of one moment": 23,
}
"""A seed that finds an edit which few of them find: the search begins there, and saves half a minute."""


def test_a_router_meets_each_client_as_it_was_at_one_moment() -> None:
    """Also while calls come late and twice, writes are lost, and routers are killed."""
    with histories() as play:
        looks = sum(play(seed).looks for seed in SEEDS)
    assert looks > len(SEEDS)


@pytest.mark.parametrize("edit", LOOKUP_EDITS, ids=lambda each: each.what.replace(" ", "-"))
def test_an_edit_of_what_subscribes_or_looks_is_found(edit: Edit) -> None:
    """A client that is not met, or is met by what has ended."""
    first = FINDS.get(edit.what, 0)
    with histories(edit) as play, pytest.raises(Broken):
        any(play(seed) is None for seed in range(first, first + MOST))
