"""The server is killed, paused, emptied or closes connections, under load."""

from __future__ import annotations

import pytest

from tests.chaos.conftest import RunScenario

pytestmark = pytest.mark.chaos


async def test_killed_server_restarts_without_loss(run_scenario: RunScenario) -> None:
    """The server is killed and restarts with its append-only file: every confirmed message is handled."""
    await run_scenario("server is killed")


@pytest.mark.parametrize("kind", ["normal", "pubsub"])
async def test_killed_connections_lose_nothing(run_scenario: RunScenario, kind: str) -> None:
    """All connections of a type are closed ten times, under load."""
    await run_scenario("connections are killed", kind=kind)


@pytest.mark.parametrize("how", ["SIGSTOP", "DEBUG SLEEP"])
async def test_silent_server_makes_workers_fence_themselves(run_scenario: RunScenario, how: str) -> None:
    """The server does not answer for two leases: all workers fence themselves, and work continues afterwards."""
    await run_scenario("server stands still", how=how)


async def test_workers_stop_without_the_server(run_scenario: RunScenario) -> None:
    """Workers that get SIGTERM while the server is away exit normally; the next ones continue."""
    await run_scenario("stop without the server")


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_flushall_is_survived(run_scenario: RunScenario, distribution: str) -> None:
    """All data is deleted under load: messages published afterwards are handled without intervention."""
    await run_scenario("flushall", distribution=distribution)


@pytest.mark.parametrize("how", ["flushall", "group reset", "failover", "one attempt", "full topic"])
async def test_what_waits_as_an_id_is_no_dead_letter_when_the_server_forgets_it(
    run_scenario: RunScenario, how: str
) -> None:
    """Also if a full topic trims it, or its owner is killed: what comes afterwards is handled, in order."""
    await run_scenario("ids waiting that the server forgets", how=how)


async def test_destroyed_group_is_created_again(run_scenario: RunScenario) -> None:
    """The group is destroyed in every partition: it is created again from the start; repeats, but no loss."""
    await run_scenario("group is destroyed")


@pytest.mark.parametrize("fsync", ["everysec", "always"])
async def test_power_loss_costs_unsynced_messages_only(run_scenario: RunScenario, fsync: str) -> None:
    """Unsynced bytes are lost: with `always` no message is lost, with `everysec` at most those of the last 2 s."""
    await run_scenario(f"power loss {fsync}")
