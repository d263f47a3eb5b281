"""Membership: what one member sees of the others, from announcements and from checks, and what it does not trust."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from math import inf
from typing import Any

import anyio
import pytest

from rsmq.errors import BrokerUnavailable
from rsmq.heartbeat.membership import Membership
from rsmq.model.clock import monotonic
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.pubsub import announce
from rsmq.redis.scripts import Ask, Script, Value
from rsmq.redis.streams import set_paused
from tests.heartbeat.member import GROUP, TOPIC, member
from tests.patience import until
from tests.servers import Server
from tests.unchecked import unchecked

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def watching(client: Client, settings: Settings, ask: Ask | None = None) -> AsyncIterator[Membership]:
    """A view of a group without a heartbeat of its own."""
    membership = Membership(client, Keys(settings.prefix), settings, "me", TOPIC, GROUP, ask)
    async with anyio.create_task_group() as tasks:
        await tasks.start(membership.run)
        yield membership
        tasks.cancel_scope.cancel()


async def register(client: Client, keys: Keys, name: str, ttl: timedelta) -> None:
    """Write the keys of a member that has no process."""
    await client.execute_command("SET", keys.alive(TOPIC, GROUP, name), "{}", "PX", int(ttl.total_seconds() * 1000))
    await client.execute_command("SADD", keys.members(TOPIC, GROUP), name)


async def test_membership_of_an_empty_group_contains_only_the_observer(client: Client, settings: Settings) -> None:
    """Before any member has joined, and without being in the set itself."""
    async with watching(client, settings) as membership:
        assert membership.live == ("me",)
        assert membership.absent == frozenset()


async def test_refresh_after_a_join_shows_the_new_member(client: Client, keys: Keys, settings: Settings) -> None:
    """The refresh ends the pause of the view and the waits of its callers."""
    slow = unchecked(settings, presence_grace=timedelta(0), heartbeat=timedelta(hours=1))
    async with watching(client, slow) as membership:
        await register(client, keys, "other", timedelta(minutes=1))
        waiting = asyncio.create_task(membership.wait(60))
        await asyncio.sleep(0)
        membership.refresh()
        await waiting
        assert membership.live == ("me", "other")


async def test_wait_after_an_unseen_change_ends_at_once(client: Client, keys: Keys, settings: Settings) -> None:
    """A change between reading `changes` and waiting ends the wait."""
    slow = unchecked(settings, presence_grace=timedelta(0), heartbeat=timedelta(hours=1))
    async with watching(client, slow) as membership:
        seen = membership.changes
        await register(client, keys, "other", timedelta(minutes=1))
        membership.refresh()
        await until(lambda: membership.live == ("me", "other"), "the new member is seen")
        async with asyncio.timeout(30):
            await membership.wait(3600, seen)


async def test_failed_check_is_repeated_before_the_next_heartbeat(
    client: Client, keys: Keys, settings: Settings
) -> None:
    """No member is watched yet, so nothing else would start a check early."""
    slow = unchecked(settings, heartbeat=timedelta(hours=1))
    failures = 0

    async def ask(script: Script, names: Sequence[str], args: Sequence[Value]) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise BrokerUnavailable("the reply is lost")
        return await script(client, names, args)

    async with watching(client, slow, ask) as membership:
        await register(client, keys, "other", timedelta(minutes=1))
        failures = 2
        membership.refresh()
        await until(lambda: membership.live == ("me", "other"), "the other is seen")


async def test_announcement_refreshes_the_view_of_every_member(
    client: Client, connector: Connector, settings: Settings
) -> None:
    """A pause is seen without waiting for the next regular check."""
    slow = unchecked(settings, lease_ttl=timedelta(minutes=10), presence_grace=timedelta(0))
    async with member("one", client, connector, slow) as one:
        await set_paused(client, one.keys, TOPIC, GROUP, paused=True)
        await until(lambda: one.membership.paused, "the pause is seen")
        await client.execute_command("DEL", one.keys.group(TOPIC, GROUP))
        await announce(client, one.keys, TOPIC, GROUP)
        await until(lambda: not one.membership.paused, "its end is seen")


async def test_member_that_died_is_pruned_from_the_set(client: Client, keys: Keys, settings: Settings) -> None:
    """Its key has expired while it was observed: it leaves the view, then the set."""
    short = unchecked(settings, lease_ttl=timedelta(seconds=1), presence_grace=timedelta(0))
    await register(client, keys, "other", timedelta(milliseconds=1500))
    async with watching(client, short) as membership:
        assert membership.live == ("me", "other")
        await until(lambda: membership.live == ("me",), "it is dead")

        async def is_empty() -> bool:
            return await client.execute_command("SCARD", keys.members(TOPIC, GROUP)) == 0

        await until(is_empty, "the set is empty")


async def test_member_that_died_before_the_observer_started_is_absent_after_the_grace(
    client: Client, keys: Keys, settings: Settings
) -> None:
    """A worker that restarts after a crash does not wait for the ttl of its previous run."""
    await register(client, keys, "former", timedelta(minutes=10))
    async with watching(client, settings) as membership:
        assert membership.live == ("former", "me")
        await until(lambda: membership.absent == {"former"}, "it is absent")
        assert membership.live == ("me",)


async def test_outage_makes_no_live_member_dead(prefix: str, keys: Keys) -> None:
    """A heartbeat key expired while the server was away: the member gets time to renew."""
    with Server(aof=True) as server:
        settings = Settings(url=server.url, prefix=prefix, lease_ttl=timedelta(seconds=2), presence_grace=timedelta(0))
        async with Connector(server.url, settings).connected() as client, watching(client, settings) as membership:
            await register(client, keys, "dying", timedelta(milliseconds=1))
            await register(client, keys, "other", timedelta(minutes=1))
            await until(
                lambda: membership.live == ("me", "other"), "it has watched long enough to declare members dead"
            )
            runs_out = ("SET", keys.alive(TOPIC, GROUP, "other"), "{}", "PX", 1)
            with pytest.raises(BrokerUnavailable):  # together: no check falls in between
                await client.pipelined([runs_out, ("SHUTDOWN", "NOSAVE")])
            await until(lambda: membership._was_out, "the outage is seen")
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await until(lambda: not membership._was_out, "the server is back")
            seen = repr(membership), membership.live
            assert await client.execute_command("EXISTS", keys.alive(TOPIC, GROUP, "other")) == 0
            assert seen[1] == ("me", "other")
            assert "live=2" in seen[0]


HOUR = {"lease_ttl": timedelta(hours=1), "presence_grace": timedelta(hours=1), "block": timedelta(seconds=1)}


async def test_member_whose_process_has_ended_is_absent_before_its_grace(
    client: Client, connector: Connector, settings: Settings
) -> None:
    """The server has closed its subscription, and its lease may be taken at once."""
    slow = unchecked(settings, **HOUR)
    async with member("one", client, connector, slow) as one:
        async with member("two", client, connector, slow) as two:
            await until(lambda: one.membership.live == ("one", "two"), "both are seen")
            assert await two.take() is not None
            one.membership.ended("two")
            await until(lambda: not one.membership._liveness.awaits_silence, "the word is not believed any more")
            assert one.membership.absent == frozenset(), "it still listens"
            assert await one.take(frozenset({"two"})) is None
        one.membership.ended("two")
        await until(lambda: one.membership.absent == {"two"}, "it is absent")
        assert one.membership.live == ("one",)
        assert await one.take(one.membership.absent) is not None


async def test_end_of_a_process_is_announced_when_the_server_has_seen_it(
    client: Client, connector: Connector, settings: Settings
) -> None:
    """Members on other hosts begin their grace at once instead of at their next regular check."""
    slow = unchecked(settings, **(HOUR | {"presence_interval": timedelta(minutes=20)}))
    async with member("one", client, connector, slow) as one, member("afar", client, connector, slow) as afar:
        async with member("two", client, connector, slow):
            await until(lambda: len(one.membership.live) == len(afar.membership.live) == 3, "all are seen")
        assert afar.membership._liveness.next_absence(monotonic()) == inf
        one.membership.ended("two")
        await until(lambda: afar.membership._liveness.next_absence(monotonic()) < inf, "its silence is seen")
        assert afar.membership.absent == frozenset()


async def test_end_of_the_grace_is_checked_when_it_is_reached(
    client: Client, connector: Connector, settings: Settings
) -> None:
    """The regular check may be far away."""
    slow = unchecked(settings, presence_interval=timedelta(hours=1))
    async with member("one", client, connector, slow) as one:
        async with member("two", client, connector, slow):
            await until(lambda: one.membership.live == ("one", "two"), "both are seen")
        one.membership.refresh()
        await until(lambda: one.membership.absent == {"two"}, "it is absent")
