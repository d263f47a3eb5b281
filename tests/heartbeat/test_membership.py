"""Membership: what one member sees of the others, announced or looked up, and what it does not believe."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
import pytest

from rsmq.connect import Client, Connector
from rsmq.errors import BrokerUnavailable
from rsmq.group import set_paused
from rsmq.heartbeat.membership import Ask, Membership, announce
from rsmq.keys import Keys
from rsmq.script import Script, Value
from rsmq.settings import Settings
from tests.heartbeat.member import GROUP, TOPIC, member
from tests.patience import until
from tests.servers import Server

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def watching(client: Client, settings: Settings, ask: Ask | None = None) -> AsyncIterator[Membership]:
    """A bare view of a group, without a heartbeat of its own."""
    membership = Membership(client, Keys(settings.prefix), settings, "me", TOPIC, GROUP, ask)
    async with anyio.create_task_group() as tasks:
        await tasks.start(membership.run)
        yield membership
        tasks.cancel_scope.cancel()


async def register(client: Client, keys: Keys, name: str, ttl: timedelta) -> None:
    """Make a member by hand, whose process is nobody's."""
    await client.execute_command("SET", keys.alive(TOPIC, GROUP, name), "{}", "PX", int(ttl.total_seconds() * 1000))
    await client.execute_command("SADD", keys.members(TOPIC, GROUP), name)


async def test_alone_it_sees_itself(client: Client, settings: Settings) -> None:
    """Before anybody has joined, and without being in the set itself."""
    async with watching(client, settings) as membership:
        assert membership.live == ("me",)
        assert membership.absent == frozenset()


async def test_a_join_is_seen_when_it_is_announced(client: Client, keys: Keys, settings: Settings) -> None:
    """A notice wakes it, and whoever waits for a change."""
    slow = settings.model_copy(update={"presence_grace": timedelta(0), "heartbeat": timedelta(hours=1)})
    async with watching(client, slow) as membership:
        await register(client, keys, "other", timedelta(minutes=1))
        waiting = asyncio.create_task(membership.wait(60))
        await asyncio.sleep(0)
        membership.notice()
        await waiting
        assert membership.live == ("me", "other")


async def test_a_change_is_not_missed(client: Client, keys: Keys, settings: Settings) -> None:
    """What has changed between somebody's look and his wait ends that wait at once."""
    slow = settings.model_copy(update={"presence_grace": timedelta(0), "heartbeat": timedelta(hours=1)})
    async with watching(client, slow) as membership:
        seen = membership.changes
        await register(client, keys, "other", timedelta(minutes=1))
        membership.notice()
        await until(lambda: membership.live == ("me", "other"), "it is seen")
        async with asyncio.timeout(30):
            await membership.wait(3600, seen)


async def test_a_look_that_fails_is_soon_repeated(client: Client, keys: Keys, settings: Settings) -> None:
    """Nobody is watched yet, so nothing else would make it look before the next heartbeat."""
    slow = settings.model_copy(update={"heartbeat": timedelta(hours=1)})
    failures = 0

    async def ask(script: Script, names: Sequence[str], args: Sequence[Value]) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise BrokerUnavailable("the answer is lost")
        return await script(client, names, args)

    async with watching(client, slow, ask) as membership:
        await register(client, keys, "other", timedelta(minutes=1))
        failures = 2
        membership.notice()
        await until(lambda: membership.live == ("me", "other"), "the other is seen")


async def test_an_announcement_reaches_every_member(client: Client, connector: Connector, settings: Settings) -> None:
    """A pause set by anybody is seen by all without waiting for the next look."""
    slow = settings.model_copy(update={"lease_ttl": timedelta(minutes=10), "presence_grace": timedelta(0)})
    async with member("one", client, connector, slow) as one:
        await set_paused(client, one.keys, TOPIC, GROUP, paused=True)
        await until(lambda: one.membership.paused, "the pause is seen")
        await client.execute_command("DEL", one.keys.group(TOPIC, GROUP))
        await announce(client, one.keys, TOPIC, GROUP)
        await until(lambda: not one.membership.paused, "its end is seen")


async def test_who_dies_without_goodbye_is_pruned(client: Client, keys: Keys, settings: Settings) -> None:
    """Its key has run out under a steady watch: gone from the view, then from the set."""
    short = settings.model_copy(update={"lease_ttl": timedelta(seconds=1), "presence_grace": timedelta(0)})
    await register(client, keys, "other", timedelta(milliseconds=1500))
    async with watching(client, short) as membership:
        assert membership.live == ("me", "other")
        await until(lambda: membership.live == ("me",), "it is dead")
        await until_empty(client, keys)


async def until_empty(client: Client, keys: Keys) -> None:
    """Wait until nobody is in the set."""
    async with asyncio.timeout(20):
        while await client.execute_command("SCARD", keys.members(TOPIC, GROUP)):
            await asyncio.sleep(0.01)


async def test_what_was_dead_before_we_came_is_absent_after_the_grace(
    client: Client, keys: Keys, settings: Settings
) -> None:
    """A worker that restarts after a crash does not wait for the ttl of its former self."""
    await register(client, keys, "former", timedelta(minutes=10))
    async with watching(client, settings) as membership:
        assert membership.live == ("former", "me")
        await until(lambda: membership.absent == {"former"}, "it is absent")
        assert membership.live == ("me",)


async def test_an_outage_kills_nobody(prefix: str, keys: Keys) -> None:
    """A steady observer, and a heartbeat that ran out while the server was away: the living get time to renew."""
    with Server(aof=True) as server:
        settings = Settings(url=server.url, prefix=prefix, lease_ttl=timedelta(seconds=2), presence_grace=timedelta(0))
        async with Connector(server.url, settings).connected() as client, watching(client, settings) as membership:
            await register(client, keys, "dying", timedelta(milliseconds=1))
            await register(client, keys, "other", timedelta(minutes=1))
            await until(lambda: membership.live == ("me", "other"), "it watches long enough to tell who is dead")
            runs_out = ("SET", keys.alive(TOPIC, GROUP, "other"), "{}", "PX", 1)
            with pytest.raises(BrokerUnavailable):  # together: no look falls in between
                await client.pipelined([runs_out, ("SHUTDOWN", "NOSAVE")])
            await until(lambda: membership._was_out, "the outage is seen")
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await until(lambda: not membership._was_out, "the server is back")
            seen = repr(membership), membership.live
            assert await client.execute_command("EXISTS", keys.alive(TOPIC, GROUP, "other")) == 0
            assert seen[1] == ("me", "other")
            assert "live=2" in seen[0]
