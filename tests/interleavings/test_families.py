"""Every order in which members note what is finished and follow the note, and that each edit is found."""

from __future__ import annotations

import pytest

from tests.interleavings.bands import Edit
from tests.interleavings.families import FAMILY_EDITS, FAMILY_SCENARIOS, FamilyScenario


@pytest.mark.parametrize("scenario", [each for each in FAMILY_SCENARIOS if each.is_short], ids=lambda each: each.name)
def test_what_follows_a_partition_comes_to_its_owner_and_is_spread_at_the_end(scenario: FamilyScenario) -> None:
    """From each state there is a way to both."""
    result = scenario.search()
    assert (result.broken, result.story) == ("", [])
    assert result.done > 0
    assert result.states > 100


@pytest.mark.parametrize("edit", FAMILY_EDITS, ids=lambda each: each.what.replace(" ", "-"))
def test_an_edit_of_families_is_found(edit: Edit) -> None:
    """There is no way on."""
    assert "no order of steps" in edit.scenario.search(edit).broken
