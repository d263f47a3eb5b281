"""Workers that are killed, paused, stopped and added under load."""

from __future__ import annotations

import pytest

from tests.chaos import batches_run
from tests.chaos.conftest import RunScenario

pytestmark = pytest.mark.chaos
both = pytest.mark.parametrize("distribution", ["hash", "shared"])


@both
async def test_killed_worker_is_replaced(run_scenario: RunScenario, distribution: str) -> None:
    """Other workers handle a killed worker's messages long before its lease of 30 s ends; none lost or reordered."""
    await run_scenario("sigkill", distribution=distribution)


async def test_worker_killed_with_a_backlog_of_ids_is_replaced_in_order(run_scenario: RunScenario) -> None:
    """Thousands of messages of five keys wait as ids: none lost, none reordered, few repeated."""
    await run_scenario("ids waiting", how="kill")


async def test_worker_killed_while_messages_wait_for_a_time_is_replaced(run_scenario: RunScenario) -> None:
    """Three kills and a sleeper: each message is handled, in order per key, and none before its time."""
    await run_scenario("killed with messages that wait for a time")


async def test_worker_killed_while_digests_run_is_replaced(run_scenario: RunScenario) -> None:
    """Three kills and a sleeper: each message is handled, in order per key, and no call is early."""
    await run_scenario("killed while digests run")


@pytest.mark.parametrize("parent", ["right", "wrong"])
async def test_killed_child_of_a_supervisor_is_replaced_at_once(run_scenario: RunScenario, parent: str) -> None:
    """Its siblings take over before any grace ends; a parent that says so of children that run does no harm."""
    await run_scenario("supervised children are killed", parent=parent)


@both
async def test_pause_longer_than_the_lease_fences_the_worker(run_scenario: RunScenario, distribution: str) -> None:
    """A worker that is paused for two leases under load is replaced; its late writes have no effect."""
    await run_scenario("long pause", distribution=distribution)


async def test_pause_shorter_than_the_lease_repeats_nothing(run_scenario: RunScenario) -> None:
    """A pause shorter than the lease causes no duplicate."""
    await run_scenario("nap")


@both
async def test_sigterm_finishes_running_handlers(run_scenario: RunScenario, distribution: str) -> None:
    """A worker that gets SIGTERM finishes running handlers and gives back the rest: no duplicate."""
    await run_scenario("sigterm", distribution=distribution)


async def test_scaling_up_and_down_keeps_order(run_scenario: RunScenario) -> None:
    """From one worker to four and back to one, under ordered load: no duplicate, no disorder, every worker is used."""
    await run_scenario("scale up and down")


async def test_message_that_kills_its_process_becomes_a_dead_letter(run_scenario: RunScenario) -> None:
    """Two of sixty messages kill their process: exactly these become dead letters."""
    await run_scenario("poison that kills", do="exit")


async def test_blocked_event_loop_keeps_its_messages(run_scenario: RunScenario) -> None:
    """A handler that blocks its event loop for two leases keeps its messages: it is not treated as dead."""
    await run_scenario("blocked event loop")


async def test_hung_handler_is_ended_by_its_timeout(run_scenario: RunScenario) -> None:
    """A timeout ends a hung handler and the message is retried; one that always hangs becomes a dead letter."""
    await run_scenario("hung handler")


@pytest.mark.parametrize("way", ["message", "broker"])
async def test_outputs_are_stored_once_while_workers_die(run_scenario: RunScenario, way: str) -> None:
    """One output for each message. With broker.publish in the handler some messages have several."""
    await run_scenario("outputs while workers die", way=way)


@pytest.mark.parametrize("limits", ["group", "name", "permit"])
async def test_permits_and_holds_outlive_their_members(run_scenario: RunScenario, limits: str) -> None:
    """Never more calls at once than permits, all of them come back, and nothing of a held name starts."""
    await run_scenario("permits while workers die", limits=limits)


async def test_batches_call_back_once_while_workers_and_publishers_die() -> None:
    """Members that fail, are rejected, or add others. The long form is `python -m tests.chaos.batches_run`."""
    assert await batches_run.run(batches=3, members=20, kills=2, seed=1) == []
