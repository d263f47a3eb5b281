"""Every order of the scripts of steps and results, and that each of their weakenings is found."""

from __future__ import annotations

import pytest

from tests.interleavings.notes import NOTE_SCENARIOS, NOTE_WEAKENINGS, NoteScenario, NoteWeakening


@pytest.mark.parametrize("scenario", NOTE_SCENARIOS, ids=lambda each: each.name)
def test_a_step_that_is_kept_is_not_done_again_and_the_settlement_has_the_result(scenario: NoteScenario) -> None:
    """All states, and from each there is a way to the end."""
    result = scenario.search()
    assert (result.broken, result.story) == ("", [])
    assert result.done > 0
    assert result.states > 100


@pytest.mark.parametrize("weakening", NOTE_WEAKENINGS, ids=lambda each: each.what.replace(" ", "-"))
def test_weakened_script_of_notes_is_found(weakening: NoteWeakening) -> None:
    """A page that is copied again, a step that goes back or stays, or no result."""
    assert weakening.search().broken
