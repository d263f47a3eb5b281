"""Presence: the subscription is restored after every interruption; work stops when it cannot be restored in time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.to_thread
import pytest
from redis import Redis

from rsmq.heartbeat import presence as presence_module
from rsmq.heartbeat.heartbeat import Heartbeat
from rsmq.heartbeat.presence import Presence, Wakeup
from rsmq.model.clock import monotonic
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector
from rsmq.testing.proxy import Proxy
from tests.heartbeat.member import GROUP, TOPIC
from tests.patience import until
from tests.servers import Server

pytestmark = pytest.mark.anyio


class Listener:
    """A presence and the callbacks it has made."""

    def __init__(self, connector: Connector, settings: Settings) -> None:
        self.changes: list[str] = []
        self.absences = 0
        self.presence = Presence(connector, settings, Keys(settings.prefix), "one", self.changes.append, self.absent)

    def absent(self) -> None:
        """Called from one of its threads."""
        self.absences += 1


@asynccontextmanager
async def listening(connector: Connector, settings: Settings) -> AsyncIterator[Listener]:
    """One that is subscribed to its own channel and to that of a group."""
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
    """The number of subscribers of its channel."""
    count: int = (await client.execute_command("PUBSUB", "NUMSUB", keys.presence("one")))[1]
    return count


async def test_presence_has_one_subscriber_and_passes_changes_on(
    listener: Listener, client: Client, keys: Keys
) -> None:
    """Its channel has exactly one subscriber, and a change announced in the group arrives."""
    assert await listeners(client, keys) == 1
    await client.execute_command("PUBLISH", keys.changes(TOPIC, GROUP), "")
    await until(lambda: listener.changes == [keys.changes(TOPIC, GROUP)], "it is announced")


async def test_change_announced_during_an_interruption_is_reported_afterwards(
    listener: Listener, client: Client, keys: Keys
) -> None:
    """After it has subscribed again, every group counts as changed."""
    await client.execute_command("CLIENT", "KILL", "TYPE", "PUBSUB")
    await until(lambda: keys.changes(TOPIC, GROUP) in listener.changes, "the change is reported")
    assert await listeners(client, keys) == 1
    assert listener.absences == 0


async def test_subscription_not_restored_within_the_grace_stops_the_work(prefix: str) -> None:
    """Also while the next connection hangs: the proxy drops one connection and swallows all data after that."""
    with Server(tcp=True) as server:
        async with Proxy(server.port) as proxy:
            settings = Settings(url=proxy.url, prefix=prefix)
            async with listening(Connector(proxy.url, settings), settings) as listener:
                proxy.cut()
                proxy.reset()
                await until(lambda: listener.absences, "the work is stopped")
                proxy.mend()
                await until(lambda: listener.changes, "it is back")


async def test_unexpected_error_in_its_thread_stops_the_work_as_well(
    listener: Listener, client: Client, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """The subscription has ended, whatever the reason: the others take over. It is restored as after any other."""

    def fail(_: object) -> None:
        raise AttributeError("Presence has no such thing")

    listener.presence._take = fail  # type: ignore[method-assign]
    await client.execute_command("PUBLISH", keys.changes(TOPIC, GROUP), "")
    await until(lambda: listener.absences > 0, "the work is stopped")
    assert listener.presence.is_absent
    assert "Presence has no such thing" in caplog.text
    del listener.presence._take
    await until(lambda: not listener.presence.is_absent, "the subscription is restored")


async def test_grace_begins_before_the_next_connection_is_tried(prefix: str) -> None:
    """The first attempt to connect again hangs, and the work stops meanwhile: the others do not wait for it either."""
    with Server(tcp=True) as server:
        async with Proxy(server.port) as proxy:
            settings = Settings(url=proxy.url, prefix=prefix, lease_ttl="PT60S", command_timeout="PT20S")
            async with listening(Connector(proxy.url, settings), settings) as listener:
                proxy.cut()
                proxy.reset()
                await until(lambda: listener.absences, "the work is stopped")
                assert proxy.connections == 1
                proxy.mend()
                await until(lambda: listener.changes, "it is back")


LISTENER = """
import sys
from rsmq.heartbeat.presence import Presence, Wakeup
from rsmq.model.clock import monotonic
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Connector
settings = Settings(url=sys.argv[1], prefix="paused")
tell = lambda word: print(word, flush=True)
presence = Presence(
    Connector(settings.url, settings), settings, Keys("paused"), "one", lambda _: tell("back"), lambda: tell("absent")
)
presence.start()
presence.listen(Keys("paused").presence("one")).result()
tell("listening")
sys.stdin.read()
"""


@pytest.mark.parametrize("news", [0, 3])
def test_grace_begins_with_a_pause_in_which_the_subscription_broke(settings: Settings, news: int) -> None:
    """A paused process notices the break when it goes on: the others have replaced it then, so it must stop at once.
    What had come before the break is read first (simulator seed 513 `--resized`)."""
    with Server() as server:
        command = (sys.executable, "-c", LISTENER, server.url)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            try:
                assert child.stdout.readline() == "listening\n"
                child.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, child.pid, os.WSTOPPED)
                with Redis.from_url(server.url) as client:
                    for _ in range(news):
                        client.publish(Keys("paused").presence("one"), "")
                    assert client.execute_command("CLIENT", "KILL", "TYPE", "PUBSUB") == 1
                time.sleep(settings.presence_grace.total_seconds())  # the pause itself
                child.send_signal(signal.SIGCONT)
                said = [child.stdout.readline()]
                while said[-1] == "back\n" and len(said) <= news:  # fewer if it was pinging: then the break comes first
                    said.append(child.stdout.readline())
                assert said[-1] == "absent\n", said
                assert child.stdout.readline() == "back\n"
            finally:
                child.kill()


async def test_grace_begins_with_a_pause_between_two_looks(
    listener: Listener, client: Client, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    """The thread is paused when its wait is over. The subscription breaks meanwhile (simulator seed 210061)."""
    wait, pause, is_over = Wakeup.wait, 0.0, threading.Event()

    def wait_and_pause(self: Wakeup, connection: object, seconds: float) -> bool:
        nonlocal pause
        has_news = wait(self, connection, seconds)
        if not has_news and not pause:
            pause = 2 * settings.presence_grace.total_seconds()
            is_over.wait(30)
        return has_news

    monkeypatch.setattr(presence_module, "monotonic", lambda: monotonic() + pause)
    monkeypatch.setattr(presence_module, "PING_INTERVAL", 60.0)  # a ping would find the break
    monkeypatch.setattr(Wakeup, "wait", wait_and_pause)
    await until(lambda: pause, "it is paused")
    assert await client.execute_command("CLIENT", "KILL", "TYPE", "PUBSUB") >= 1
    assert not listener.absences
    is_over.set()
    await until(lambda: listener.changes, "it is back")
    assert listener.absences


def test_grace_goes_on_after_a_return_that_the_others_may_not_have_seen(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A return between two of their looks: they count from the break before it. After a longer return, a new grace."""
    now = 100.0
    monkeypatch.setattr(presence_module, "monotonic", lambda: now)
    presence = Listener(Connector(settings.url, settings), settings).presence
    grace = settings.presence_grace.total_seconds() * 0.8

    def left_after_a_break() -> float:
        presence._ran_at = now
        presence._broken(OSError("broken"))
        timer = presence._absence_timer
        assert timer is not None
        presence._restored()
        return float(timer.interval)

    presence._restored()
    now += 100
    assert left_after_a_break() == pytest.approx(grace)
    now += grace / 2
    assert left_after_a_break() == pytest.approx(grace / 2)
    now += 2 * settings.presence_grace.total_seconds()
    assert left_after_a_break() == pytest.approx(grace)


async def test_interruption_without_a_grace_stops_no_work(prefix: str) -> None:
    """`RSMQ_PRESENCE_GRACE=PT0S`: no member is replaced because of absence, so none has to stop for it."""
    with Server() as server:
        settings = Settings(url=server.url, prefix=prefix, presence_grace="PT0S")
        async with listening(Connector(server.url, settings), settings) as listener:
            await asyncio.to_thread(server.restart)
            await until(lambda: listener.changes, "it is back")
            assert listener.absences == 0


async def test_presence_after_a_silent_failover_moves_to_the_new_master(prefix: str, keys: Keys) -> None:
    """The old master keeps the subscription, but no member asks it; the heartbeat notices that and moves it."""
    with Server(tcp=True) as old, Server(tcp=True) as new:
        async with Proxy(old.port) as proxy:
            settings = Settings(url=proxy.url, prefix=prefix)
            heartbeat = Heartbeat(Connector(proxy.url, settings), settings, keys, "one")
            heartbeat.start(asyncio.get_running_loop())
            try:
                await heartbeat.join(TOPIC, GROUP, {}, lambda: None)
                proxy._target = new.port  # what connects from now on gets there
                with old.client() as admin:
                    admin.replicaof("127.0.0.1", new.port)
                async with Connector(new.url, settings).connected() as client, asyncio.timeout(20):
                    alive = keys.alive(TOPIC, GROUP, "one")
                    while not (await listeners(client, keys) and await client.execute_command("EXISTS", alive)):
                        await asyncio.sleep(0.01)
            finally:
                await anyio.to_thread.run_sync(heartbeat.stop)
