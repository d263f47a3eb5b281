"""Every order of the script that lends permits, and that each of its weakenings is found."""

from __future__ import annotations

import pytest

from tests.interleavings.permits import PERMIT_SCENARIOS, PERMIT_WEAKENINGS, PermitScenario, PermitWeakening


@pytest.mark.parametrize("scenario", [each for each in PERMIT_SCENARIOS if each.is_short], ids=lambda each: each.name)
def test_permits_never_exceed_their_limit_and_always_come_back(scenario: PermitScenario) -> None:
    """All states, and from each there is a way to the end."""
    result = scenario.search()
    assert (result.broken, result.story) == ("", [])
    assert result.done > 0
    assert result.states > 300


@pytest.mark.parametrize("weakening", PERMIT_WEAKENINGS, ids=lambda each: each.what.replace(" ", "-"))
def test_weakened_script_of_permits_is_found(weakening: PermitWeakening) -> None:
    """More calls than permits, or a permit that is lost for good."""
    assert weakening.scenario.search(weakening.script).broken
