"""Every order of a letter that comes along with its ring, and that each of its weakenings is found."""

from __future__ import annotations

import pytest

from tests.interleavings.pushes import PUSH_SCENARIOS, PUSH_WEAKENINGS, PushScenario, PushWeakening


@pytest.mark.parametrize("scenario", [each for each in PUSH_SCENARIOS if each.is_short], ids=lambda each: each.name)
def test_a_letter_that_comes_along_with_its_ring_is_received_once_and_never_lost(scenario: PushScenario) -> None:
    """All states, and from each there is a way to the end."""
    result = scenario.search()
    assert (result.broken, result.story) == ("", [])
    assert result.done > 0
    assert result.states > 300


@pytest.mark.parametrize("weakening", PUSH_WEAKENINGS, ids=lambda each: each.what.replace(" ", "-"))
def test_weakened_push_is_found(weakening: PushWeakening) -> None:
    """A letter that is lost, out of order, or not marked as sent before."""
    assert weakening.search().broken
