"""The server dies, sleeps, forgets and hangs up, under load."""

from __future__ import annotations

import pytest

from tests.chaos.conftest import Play

pytestmark = pytest.mark.chaos


async def test_sigkill_and_restart(play: Play) -> None:
    """The server is killed and comes back with its append-only file: all that was confirmed is handled."""
    await play("server is killed")


@pytest.mark.parametrize("kind", ["normal", "pubsub"])
async def test_connections_are_killed(play: Play, kind: str) -> None:
    """All connections of a kind are closed ten times, under load."""
    await play("connections are killed", kind=kind)


@pytest.mark.parametrize("how", ["SIGSTOP", "DEBUG SLEEP"])
async def test_server_stands_still(play: Play, how: str) -> None:
    """The server answers nobody for two leases: everybody fences itself, nobody takes what is not free, all goes on."""
    await play("server stands still", how=how)


async def test_stop_without_the_server(play: Play) -> None:
    """Workers that are asked to stop while the server is away end in order; the next ones go on."""
    await play("stop without the server")


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_flushall(play: Play, distribution: str) -> None:
    """Everything in the server is deleted under load: what is published afterwards flows, without anybody's help."""
    await play("flushall", distribution=distribution)


async def test_group_is_destroyed(play: Play) -> None:
    """Somebody destroys the group in every partition: it is made again from the start; repeats, but no loss."""
    await play("group is destroyed")


@pytest.mark.parametrize("fsync", ["everysec", "always"])
async def test_power_loss(play: Play, fsync: str) -> None:
    """Bytes that were not on the disk are gone: with `always` nothing is lost, with `everysec` the last 2 s at most."""
    await play(f"power loss {fsync}")
