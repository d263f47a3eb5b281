"""Every order of the scripts of a digest, and that each of its weakenings is found."""

from __future__ import annotations

import pytest

from tests.interleavings.digests import DIGEST_SCENARIOS, DIGEST_WEAKENINGS, DigestScenario, DigestWeakening


@pytest.mark.parametrize("scenario", [each for each in DIGEST_SCENARIOS if each.is_short], ids=lambda each: each.name)
def test_no_call_is_early_incomplete_or_repeated_with_other_messages(scenario: DigestScenario) -> None:
    """All states, and from each there is a way to the end."""
    result = scenario.search()
    assert (result.broken, result.story) == ("", [])
    assert result.done > 0
    assert result.states > 300


@pytest.mark.parametrize(
    "weakening", [each for each in DIGEST_WEAKENINGS if each.is_short], ids=lambda each: each.what.replace(" ", "-")
)
def test_weakened_digest_is_found(weakening: DigestWeakening) -> None:
    """A call that is early, incomplete or repeated with other messages, or that never comes."""
    assert weakening.search().broken
