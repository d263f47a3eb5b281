"""Every order in which a band is added, opened and used, and that each edit of the code behind it is found."""

from __future__ import annotations

import pytest

from tests.interleavings.bands import BAND_EDITS, BAND_SCENARIOS, BandScenario, Edit


@pytest.mark.parametrize("scenario", [each for each in BAND_SCENARIOS if each.is_short], ids=lambda each: each.name)
def test_a_band_is_opened_when_all_know_it_and_loses_nothing(scenario: BandScenario) -> None:
    """All states, and from each there is a way to the end."""
    result = scenario.search()
    assert (result.broken, result.story) == ("", [])
    assert result.done > 0
    assert result.states > 10


@pytest.mark.parametrize(
    "edit", [each for each in BAND_EDITS if each.scenario.is_short], ids=lambda each: each.what.replace(" ", "-")
)
def test_an_edit_of_what_adds_a_band_is_found_with_its_story(edit: Edit) -> None:
    """A lost message, a band that is open too early, a number of two bands, or no way to the end."""
    result = edit.scenario.search(edit)
    assert result.broken
    assert result.story


@pytest.mark.parametrize("edit", BAND_EDITS, ids=lambda each: each.what.replace(" ", "-"))
def test_an_edit_is_one_of_the_code(edit: Edit) -> None:
    """The text that it replaces is there, once, and what it has changed is as before after it."""
    before = getattr(edit.owner, edit.function)
    with edit.applied():
        assert getattr(edit.owner, edit.function) is not before
    assert getattr(edit.owner, edit.function) is before
