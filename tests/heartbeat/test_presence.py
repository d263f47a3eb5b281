"""Presence: held through everything, and work stopped when it cannot be held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.to_thread
import pytest

from rsmq.connect import Client, Connector
from rsmq.heartbeat.beat import Beat
from rsmq.heartbeat.presence import Presence
from rsmq.keys import Keys
from rsmq.settings import Settings
from tests.chaos.proxy import Proxy
from tests.heartbeat.member import GROUP, TOPIC
from tests.patience import until
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


async def test_after_a_failover_without_farewell_it_listens_where_the_others_ask(prefix: str, keys: Keys) -> None:
    """The old master keeps the subscription and is asked by nobody; the beat sees that nobody sees us."""
    with Server(tcp=True) as old, Server(tcp=True) as new:
        async with Proxy(old.port) as line:
            settings = Settings(url=line.url, prefix=prefix)
            beat = Beat(Connector(line.url, settings), settings, keys, "one")
            beat.start(asyncio.get_running_loop())
            try:
                await beat.join(TOPIC, GROUP, {}, lambda: None)
                line._target = new.port  # what connects from now on gets there
                with old.client() as admin:
                    admin.replicaof("127.0.0.1", new.port)
                async with Connector(new.url, settings).connected() as client, asyncio.timeout(20):
                    alive = keys.alive(TOPIC, GROUP, "one")
                    while not (await listeners(client, keys) and await client.execute_command("EXISTS", alive)):
                        await asyncio.sleep(0.01)
            finally:
                await anyio.to_thread.run_sync(beat.stop)
