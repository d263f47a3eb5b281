"""A group of up to a thousand members: what it costs at rest, and when one comes or goes.

The views of sixteen members are real, all in this process, among them those of the eight watchers. What the others send
at rest is played, and their subscriptions are real, over two connections each.
"""

from __future__ import annotations

import resource
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import anyio
import redis.asyncio

from benchmarks.server import ServerMeter
from rsmq import Broker, Settings
from rsmq.heartbeat.assignment import assign
from rsmq.heartbeat.group_watch import watchers_of
from rsmq.heartbeat.membership import Membership, refuse_mixed_ordering
from rsmq.model.keys import Keys
from rsmq.model.member import JOINED, LEFT, news_in, news_of
from rsmq.redis.scripts import LOOK_AT_GROUP

TOPIC, GROUP = "t", "g"
PARTITIONS: Final = 1024
REST_SECONDS: Final = 6.0
CHANGES: Final = 10
INFO: Final = '{"handler": "app.handle", "concurrency": 64, "lease_ttl_ms": 6000, "ordering": "key", "limits": []}'


class PlayedMembers:
    """What members send at rest, from a thread, each over a connection of its own; and their subscriptions."""

    def __init__(self, path: str, keys: Keys, names: Sequence[str], seconds: float) -> None:
        self._path, self._keys, self._seconds = path, keys, seconds
        self._subscriptions = [self._connected(self._subscription(name)) for name in names]
        self._selector = selectors.DefaultSelector()
        self._calls = list[tuple[socket.socket, bytes]]()
        for name in names:
            connection = self._connected(b"")
            self._selector.register(connection, selectors.EVENT_READ)
            self._calls.append((connection, self._beat(name)))
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _connected(self, first: bytes) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        connection.sendall(first)
        return connection

    def _subscription(self, name: str) -> bytes:
        return packed("SUBSCRIBE", self._keys.presence(name), self._keys.changes(TOPIC, GROUP))

    def _beat(self, name: str) -> bytes:
        """The heartbeat, and the question of a member that does not watch."""
        keys = self._keys
        names = keys.members(TOPIC, GROUP), keys.group(TOPIC, GROUP), keys.watched(TOPIC, GROUP)
        return b"".join([
            packed("PUBSUB", "NUMSUB", keys.presence(name)),
            packed("PEXPIRE", keys.alive(TOPIC, GROUP, name), "600000"),
            packed("SISMEMBER", keys.members(TOPIC, GROUP), name),
            packed("SET", keys.vitals(TOPIC, GROUP, name), "{}", "PX", "6000"),
            packed(*map(str, LOOK_AT_GROUP.command(names, ()))),
        ])  # fmt: skip

    def _run(self) -> None:
        began, sent = time.monotonic(), 0
        while self._calls and not self._ending.is_set():
            due = int((time.monotonic() - began) / self._seconds * len(self._calls))
            for at in range(sent, due):
                connection, call = self._calls[at % len(self._calls)]
                connection.sendall(call)
            sent = due
            for key, _ in self._selector.select(0.005):
                key.fileobj.recv(65536)  # type: ignore[union-attr]
            time.sleep(0.005)

    def close(self) -> None:
        """End the thread and close all connections."""
        self._ending.set()
        self._thread.join()
        for connection in (*self._subscriptions, *[each for each, _ in self._calls]):
            connection.close()


def packed(*words: str) -> bytes:
    """A command on the wire."""
    raw = [word.encode() for word in words]
    return b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in raw)


class Group:
    """So many members of one group: the watchers and as many others are real."""

    def __init__(self, broker: Broker, url: str, size: int) -> None:
        self._broker, self._url = broker, url
        self.names = [f"host-{number % 50}-{number}-{number:08x}" for number in range(size)]
        watchers = watchers_of(self.names, f"{TOPIC}/{GROUP}")
        others = [name for name in self.names if name not in watchers]
        self.real = [*watchers, *others[:8]]
        self.played = others[8:]
        self.views = list[Membership]()
        self.presences = dict[str, Any]()

    async def begin(self, stack: AsyncExitStack) -> None:
        """Write the members, subscribe for each, and let the real ones look at the group."""
        client, keys = self._broker.client, self._broker.keys
        for at in range(0, len(self.names), 100):
            await client.pipelined([
                command
                for name in self.names[at : at + 100]
                for command in (
                    ("SET", keys.alive(TOPIC, GROUP, name), INFO, "PX", 600_000),
                    ("SADD", keys.members(TOPIC, GROUP), name),
                )
            ])  # fmt: skip
        await client.execute_command("SCRIPT", "LOAD", LOOK_AT_GROUP.source)
        seconds = self._broker.settings.lease_ttl.total_seconds() / 4
        played = PlayedMembers(self._url.removeprefix("unix://"), keys, self.played, seconds)
        stack.callback(played.close)
        for name in self.real:
            self.presences[name] = await self._subscribed(name, stack)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        for name in self.real:
            view = Membership(
                client, keys, self._broker.settings, name, TOPIC, GROUP, on_members=lambda *_: None
            )  # fmt: skip
            self.views.append(view)
            await tasks.start(view.run)
        tasks.start_soon(self._hear, self.presences[self.real[0]])

    async def _subscribed(self, name: str, stack: AsyncExitStack) -> Any:
        connection = redis.asyncio.Redis.from_url(self._url).pubsub()
        stack.push_async_callback(connection.aclose)
        await connection.subscribe(self._broker.keys.presence(name), self._broker.keys.changes(TOPIC, GROUP))
        return connection

    async def _hear(self, connection: Any) -> None:
        """Pass on what is announced to each view, as the presence of each member does."""
        async for message in connection.listen():
            if message["type"] == "message":
                news = news_in(message["data"])
                for view in self.views:
                    if news is None:
                        view.refresh()
                    else:
                        view.hear(*news)

    async def join(self, name: str) -> None:
        """What one more member asks and writes."""
        client, keys = self._broker.client, self._broker.keys
        await client.execute_command("SET", keys.alive(TOPIC, GROUP, name), INFO)
        await client.execute_command("SADD", keys.members(TOPIC, GROUP), name)
        await client.execute_command("PUBLISH", keys.changes(TOPIC, GROUP), news_of(JOINED, [name]))
        for _ in range(2):
            await refuse_mixed_ordering(client, keys, TOPIC, GROUP, name, "key")

    async def leave(self, name: str) -> None:
        """What it writes when it goes."""
        client, keys = self._broker.client, self._broker.keys
        await client.execute_command("SREM", keys.members(TOPIC, GROUP), name)
        await client.execute_command("DEL", keys.alive(TOPIC, GROUP, name))
        await client.execute_command("PUBLISH", keys.changes(TOPIC, GROUP), news_of(LEFT, [name]))


async def groups(url: str, meter: ServerMeter, size: int) -> dict[str, float]:
    """One group of `size` members: at rest, ten joins and leaves, the assignment."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    meter.start(empty=True)
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(Broker(Settings(url=url, prefix="scale", preflight="warn")))
        group = Group(broker, url, size)
        await group.begin(stack)
        meter.start()
        began, cpu = time.perf_counter(), time.process_time()
        await anyio.sleep(REST_SECONDS)
        passed = time.perf_counter() - began
        rest_us, rest_cpu = meter.cpu_us / passed, (time.process_time() - cpu) / passed
        meter.start()
        began, cpu = time.perf_counter(), time.process_time()
        for number in range(CHANGES):
            newcomer = f"host-51-{number}-ffffffff"
            for change, count in ((group.join, size + 1), (group.leave, size)):
                await change(newcomer)
                with anyio.fail_after(60):
                    while any(len(view.live) != count for view in group.views[1:]):
                        await anyio.sleep(0.05)
        passed = time.perf_counter() - began
        per_change = 2.0 * CHANGES
        change_us = (meter.cpu_us - rest_us * passed) / per_change
        change_cpu = (time.process_time() - cpu - rest_cpu * passed) / per_change / len(group.real)
        cpu = time.process_time()
        assign(PARTITIONS, group.names, f"{TOPIC}/{GROUP}")
        assign_ms = (time.process_time() - cpu) * 1000
        return {
            "rest_server_percent": rest_us / 1e4,
            "change_server_ms": change_us / 1000,
            "change_view_ms": change_cpu * 1000,
            "assign_ms": assign_ms,
        }
