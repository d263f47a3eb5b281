"""Every order in which a partition goes on before those that it follows are finished, and that each edit is found."""

from __future__ import annotations

import pytest

from tests.interleavings.bands import Edit
from tests.interleavings.seams import SEAM_EDITS, SEAM_SCENARIOS, SeamScenario


@pytest.mark.parametrize("scenario", [each for each in SEAM_SCENARIOS if each.is_short], ids=lambda each: each.name)
def test_what_goes_on_behind_a_sealed_partition_keeps_the_order_of_keys(scenario: SeamScenario) -> None:
    """All states, and from each there is a way to the end."""
    result = scenario.search()
    assert (result.broken, result.story) == ("", [])
    assert result.done > 0
    assert result.states > 10


@pytest.mark.parametrize("edit", SEAM_EDITS, ids=lambda each: each.what.replace(" ", "-"))
def test_an_edit_of_what_goes_on_is_found_with_its_story(edit: Edit) -> None:
    """A message out of order or beside another one of its key, or no way to the end."""
    result = edit.scenario.search(edit)
    assert result.broken
    assert result.story or "no order of steps" in result.broken
