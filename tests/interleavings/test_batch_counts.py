"""Every order of the scripts that count a batch, and that each of their weakenings is found."""

from __future__ import annotations

import pytest

from tests.interleavings.batch_counts import BATCH_SCENARIOS, BATCH_WEAKENINGS, BatchScenario, BatchWeakening


@pytest.mark.parametrize("scenario", [each for each in BATCH_SCENARIOS if each.is_short], ids=lambda each: each.name)
def test_a_batch_calls_back_once_when_its_last_member_has_ended(scenario: BatchScenario) -> None:
    """All states, and from each there is a way to the end."""
    result = scenario.search()
    assert (result.broken, result.story) == ("", [])
    assert result.done > 0
    assert result.states > 50


@pytest.mark.parametrize("weakening", BATCH_WEAKENINGS, ids=lambda each: each.what.replace(" ", "-"))
def test_weakened_script_of_a_batch_is_found(weakening: BatchWeakening) -> None:
    """A callback too early, twice or never, or wrong numbers."""
    assert weakening.search().broken
