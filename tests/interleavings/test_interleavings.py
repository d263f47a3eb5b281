"""The short scenarios of the search, and a few weakened scripts that it must find; `make` runs no more of it."""

from __future__ import annotations

import pytest

from tests.interleavings.scenarios import SCENARIOS, WEAKENINGS, Scenario, Weakening
from tests.interleavings.search import Result, Search
from tests.interleavings.store import store

QUICK = {
    "park_message checks neither owner nor epoch",
    "settle_messages checks neither owner nor epoch",
    "take_lease grants a lease that another member has",
    "take_lease keeps the epoch",
    "release_lease deletes a consumer with pending messages",
    "park_message stores no due time",
    "park_message leaves parked what a failover has parked again",
    "settle_outputs acknowledges before a sealed stream refuses",
    "bury_message acknowledges before a right is refused",
    "settle_messages leaves parked what a failover has parked again",
    "start_message does not charge the attempt",
    "start_message of a batch does not charge the attempt",
    "settle_messages acknowledges what another member has",
    "adopt_pending takes over what is not its own",
    "put_aside checks neither owner nor epoch",
    "put_aside leaves what has not started counted",
    "put_aside drops what was deleted",
    "put_aside buries what it has buried",
    "read_again drops what is not pending",
    "read_again does not count the start",
    "claim_ids checks neither owner nor epoch",
    "members leave out keys that only wait",
    "members leave out the last place of a key",
    "members leave out the key of what leaves a name",
}
"""Found within a thousand states or so."""


def search(scenario: Scenario) -> Result:
    """What the search finds."""
    with store("m1", "m2") as server:
        return Search(scenario.moves(server)).run()


@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if each.is_short], ids=lambda each: each.name)
def test_every_order_keeps_every_promise(scenario: Scenario) -> None:
    """All states, and from each there is a way to the end."""
    result = search(scenario)
    assert (result.broken, result.story) == ("", [])
    assert result.done > 0
    assert result.states > 300


@pytest.mark.parametrize(
    "weakening", [each for each in WEAKENINGS if each.name in QUICK], ids=lambda each: each.name.replace(" ", "-")
)
def test_weakened_script_is_found_with_its_story(weakening: Weakening) -> None:
    """The story begins with a lease, or an open partition, and ends where the promise is broken."""
    with weakening.applied():
        result = search(weakening.scenario)
    assert result.broken
    assert result.story[0].startswith(("m1 takes the lease", "m1 opens the partition"))


@pytest.mark.parametrize("weakening", WEAKENINGS, ids=lambda each: each.name.replace(" ", "-"))
def test_weakening_is_an_edit_of_the_script(weakening: Weakening) -> None:
    """The text that it replaces is there, once."""
    with weakening.applied():
        pass


def test_quick_weakenings_exist() -> None:
    """None of them has another name now."""
    assert {each.name for each in WEAKENINGS} >= QUICK
