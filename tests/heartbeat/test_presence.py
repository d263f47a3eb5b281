"""Presence: held through everything, and work stopped when it cannot be held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.to_thread
import pytest

from rsmq.connect import Client, Connector
from rsmq.heartbeat.presence import Presence
from rsmq.keys import Keys
from rsmq.settings import Settings
from tests.chaos.proxy import Proxy
from tests.heartbeat.member import GROUP, TOPIC, member, until
from tests.servers import Server

pytestmark = pytest.mark.anyio


class Listener:
    """A presence, and what it has called."""

    def __init__(self, connector: Connector, settings: Settings) -> None:
        self.changes: list[str] = []
        self.absences = 0
        self.presence = Presence(connector, settings, Keys(settings.prefix), "one", self.changes.append, self.absent)

    def absent(self) -> None:
        """Called from one of its threads."""
        self.absences += 1


@asynccontextmanager
async def listening(connector: Connector, settings: Settings) -> AsyncIterator[Listener]:
    """One that is subscribed to its own channel and to those of a group."""
    listener = Listener(connector, settings)
    listener.presence.start()
    try:
        keys = Keys(settings.prefix)
        await asyncio.wrap_future(listener.presence.listen(keys.changes(TOPIC, GROUP)))
        await asyncio.wrap_future(listener.presence.listen(keys.presence("one")))
        yield listener
    finally:
        await anyio.to_thread.run_sync(listener.presence.stop)


@pytest.fixture
async def listener(connector: Connector, settings: Settings) -> AsyncIterator[Listener]:
    """One on the shared server."""
    async with listening(connector, settings) as one:
        yield one


async def listeners(client: Client, keys: Keys) -> int:
    """How many the server says to listen on its channel."""
    count: int = (await client.execute_command("PUBSUB", "NUMSUB", keys.presence("one")))[1]
    return count


async def test_it_is_seen_and_hears(listener: Listener, client: Client, keys: Keys) -> None:
    """Exactly one listens on the channel, and what is announced in the group arrives."""
    assert await listeners(client, keys) == 1
    await client.execute_command("PUBLISH", keys.changes(TOPIC, GROUP), "")
    await until(lambda: listener.changes == [keys.changes(TOPIC, GROUP)], "it is announced")


async def test_what_was_announced_while_it_was_broken_is_not_missed(
    listener: Listener, client: Client, keys: Keys
) -> None:
    """Subscribed again, it looks as if something had been announced."""
    await client.execute_command("CLIENT", "KILL", "TYPE", "PUBSUB")
    await until(lambda: keys.changes(TOPIC, GROUP) in listener.changes, "it looks")
    assert await listeners(client, keys) == 1
    assert listener.absences == 0


async def test_what_cannot_be_renewed_within_the_grace_stops_the_work(prefix: str) -> None:
    """Also while the next connection hangs: the line is broken once and swallows everything after that."""
    with Server(tcp=True) as server:
        async with Proxy(server.port) as proxy:
            settings = Settings(url=proxy.url, prefix=prefix)
            async with listening(Connector(proxy.url, settings), settings) as listener:
                proxy.cut()
                proxy.reset()
                await until(lambda: listener.absences, "the work is stopped")
                proxy.mend()
                await until(lambda: listener.changes, "it is back")


async def test_without_a_grace_nothing_is_stopped(prefix: str) -> None:
    """`RSMQ_PRESENCE_GRACE=PT0S`: nobody is replaced by absence, so nobody has to stop for it."""
    with Server() as server:
        settings = Settings(url=server.url, prefix=prefix, presence_grace="PT0S")
        async with listening(Connector(server.url, settings), settings) as listener:
            await asyncio.to_thread(server.restart)
            await until(lambda: listener.changes, "it is back")
            assert listener.absences == 0


async def test_a_member_that_nobody_sees_listens_again(client: Client, connector: Connector, settings: Settings) -> None:
    """The thread may be subscribed to a server that nobody asks any more: the beat asks what the others would."""
    async with member("one", client, connector, settings) as one:
        (channel,) = await client.execute_command("PUBSUB", "CHANNELS", one.keys.presence("*"))
        one.beat._presence._wanted.pop(channel.decode())  # it believes to be done, as after a failover without farewell
        await client.execute_command("CLIENT", "KILL", "TYPE", "PUBSUB")
        await until(lambda: not one.beat._presence._subscribed, "it is broken")
        one.beat._presence.listen(channel.decode())
        one.beat.poke()
        async with asyncio.timeout(20):
            while not await listeners(client, one.keys):
                await asyncio.sleep(0.01)
