"""Every order in which a topic is resized and used, and that each edit of the code behind it is found."""

from __future__ import annotations

import pytest

from tests.interleavings.bands import Edit
from tests.interleavings.resizing import RESIZE_EDITS, RESIZE_SCENARIOS, ResizeScenario


@pytest.mark.parametrize("scenario", [each for each in RESIZE_SCENARIOS if each.is_short], ids=lambda each: each.name)
def test_a_topic_that_is_resized_loses_and_reorders_nothing(scenario: ResizeScenario) -> None:
    """All states, and from each there is a way to the end."""
    result = scenario.search()
    assert (result.broken, result.story) == ("", [])
    assert result.done > 0
    assert result.states > 10


@pytest.mark.parametrize("edit", RESIZE_EDITS, ids=lambda each: each.what.replace(" ", "-"))
def test_an_edit_of_what_resizes_is_found_with_its_story(edit: Edit) -> None:
    """A message out of order or lost, two layouts of one version, or no way to the end."""
    result = edit.scenario.search(edit)
    assert result.broken
    assert result.story or "no order of steps" in result.broken
