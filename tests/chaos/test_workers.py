"""Workers that die, sleep, stop, come and go, under load."""

from __future__ import annotations

import pytest

from tests.chaos.conftest import Play

pytestmark = pytest.mark.chaos
both = pytest.mark.parametrize("distribution", ["hash", "shared"])


@both
async def test_sigkill(play: Play, distribution: str) -> None:
    """A killed worker's messages run elsewhere long before its lease of 30 s is over; nothing is lost or reordered."""
    await play("sigkill", distribution=distribution)


@both
async def test_pause_longer_than_the_lease(play: Play, distribution: str) -> None:
    """A worker that sleeps for two leases under load is replaced; awake again it spoils nothing."""
    await play("long pause", distribution=distribution)


async def test_pause_shorter_than_the_lease(play: Play) -> None:
    """A nap costs nothing: not even a duplicate."""
    await play("nap")


@both
async def test_sigterm(play: Play, distribution: str) -> None:
    """A worker that is asked to stop finishes what runs and hands back the rest: no duplicate at all."""
    await play("sigterm", distribution=distribution)


async def test_scale_up_and_down(play: Play) -> None:
    """From one worker to four and back to one, under ordered load: no duplicate, no disorder, everybody works."""
    await play("scale up and down")


async def test_crash_loop(play: Play) -> None:
    """Two messages that kill their process, among sixty: they are the dead letters, and nobody else is."""
    await play("poison that kills", do="exit")


async def test_blocked_event_loop(play: Play) -> None:
    """A handler that blocks its event loop for two leases keeps its messages: a slow handler is not a dead one."""
    await play("blocked event loop")


async def test_hung_handler(play: Play) -> None:
    """A handler that hangs is ended by its timeout and tried again; one that always hangs becomes a dead letter."""
    await play("hung handler")
