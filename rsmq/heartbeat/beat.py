"""The heartbeat: one thread per process that keeps members alive, leases ours and our presence visible.

A thread with connections of its own, because a handler that blocks the event loop must not kill its member.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio.to_thread
from redis.exceptions import NoScriptError, RedisError, ResponseError

from rsmq.clock import monotonic, to_ms
from rsmq.connect import BlockingClient, Connector
from rsmq.heartbeat.lease import Lease
from rsmq.heartbeat.presence import Presence, call
from rsmq.heartbeat.vitals import Vitals
from rsmq.keys import Keys
from rsmq.script import OK, RENEW_LEASE, TOUCH_MESSAGES
from rsmq.settings import Settings

log = logging.getLogger("rsmq.heartbeat")

TOUCH_CHUNK = 500
PAUSES = 5
LONGEST_PAUSE = 0.2
"""Seconds. After a beat that failed the next comes sooner: its time-out has taken a third of the lease already, and
what is left must do for a connection and all its answers."""


@dataclass(slots=True)
class Joined:
    """One group that this member belongs to."""

    topic: str
    group: str
    info: str
    on_change: Callable[[], None]
    confirmed: Future[None] = field(default_factory=Future)


@dataclass(slots=True)
class Touched:
    """What a member has in hand in one partition, under shared distribution."""

    stream: str
    group: str
    lease: Lease
    held: Callable[[], list[bytes]]


class Beat:
    """Renews everything of one member every `heartbeat_interval`.

    Renewal counts from its start: a lease is believed until `started + ttl - margin`. Whatever the server refuses is
    lost at once. The thread never dies of an error: it reports an outage once and tries again.
    """

    def __init__(self, connector: Connector, settings: Settings, keys: Keys, member: str) -> None:
        self.member = member
        self._settings, self._keys = settings, keys
        self._connector = connector
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # a beat in the air must not bring back who says goodbye
        self._joined: dict[tuple[str, str], Joined] = {}
        self._leases: dict[Lease, Callable[[Lease], None]] = {}
        self._touched: dict[tuple[str, str], Touched] = {}
        self._poked = threading.Event()
        self._ending = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=f"rsmq-beat-{member}", daemon=True)
        self._presence = Presence(connector, settings, keys, member, self._announced, self.fence)
        self._vitals = Vitals()
        self._is_out = False
        self.landed = monotonic()  # when a beat was last confirmed; read by other threads

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to beat; callbacks are called in `loop`."""
        self._loop = loop
        self._thread.start()
        self._presence.start()

    def stop(self) -> None:
        """End both threads; blocks for a second at most beyond a command in the air."""
        self._ending.set()
        self._poked.set()
        self._presence.stop()
        self._thread.join(timeout=5)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def poke(self) -> None:
        """Beat now."""
        self._poked.set()

    # -- what to keep alive ---------------------------------------------------------------------------------------

    async def join(self, topic: str, group: str, info: Mapping[str, object], on_change: Callable[[], None]) -> None:
        """Become a member; returns when the others can see it."""
        joined = Joined(topic, group, json.dumps({"member": self.member, **info}), on_change)
        listening = self._presence.listen(self._keys.changes(topic, group))
        with self._lock:
            self._joined[topic, group] = joined
        self.poke()
        await asyncio.wrap_future(joined.confirmed)
        await asyncio.wrap_future(listening)

    async def leave(self, topic: str, group: str) -> None:
        """Say goodbye, so that the others rebalance at once."""
        with self._lock:
            joined = self._joined.pop((topic, group), None)
        if joined is not None:
            await anyio.to_thread.run_sync(self._say_goodbye, topic, group, abandon_on_cancel=True)

    def watch(self, lease: Lease, on_lost: Callable[[Lease], None]) -> None:
        """Renew a lease; `on_lost` is called in the loop when the server refuses."""
        with self._lock:
            self._leases[lease] = on_lost

    def forget(self, lease: Lease) -> None:
        """Do not renew it any more."""
        with self._lock:
            self._leases.pop(lease, None)

    def touch(self, stream: str, group: str, lease: Lease, held: Callable[[], list[bytes]]) -> None:
        """Keep messages in hand from looking abandoned; `held` is called from the thread."""
        with self._lock:
            self._touched[stream, group] = Touched(stream, group, lease, held)

    def untouch(self, stream: str, group: str) -> None:
        """Do not touch them any more."""
        with self._lock:
            self._touched.pop((stream, group), None)

    def fence(self) -> None:
        """Give up every lease locally: the others may believe that we are gone."""
        with self._lock:
            leases, touched = dict(self._leases), list(self._touched.values())
        for lease, on_lost in leases.items():
            self._lost(lease, on_lost)
        for one in touched:
            one.lease.lose()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        client = self._connector.blocking_client()
        interval = self._settings.heartbeat_interval.total_seconds()
        while not self._ending.is_set():
            self._poked.clear()
            try:
                self._beat(client)
                self.landed = monotonic()
                if self._is_out:
                    log.info("the heartbeat of %s is back", self.member)
                self._is_out = False
                self._poked.wait(interval)
            except (RedisError, OSError) as error:
                (log.debug if self._is_out else log.warning)("the heartbeat of %s fails: %s", self.member, error)
                self._is_out = True
                client.disconnect()  # it may lead to a master that is none any more
                self._ending.wait(min(interval / PAUSES, LONGEST_PAUSE))
            except Exception:
                log.exception("the heartbeat of %s met a defect", self.member)
                self._ending.wait(interval)
        client.close()

    def _beat(self, client: BlockingClient) -> None:
        with self._lock:
            joined, leases = list(self._joined.values()), dict(self._leases)
            touched = list(self._touched.values())
        started = monotonic()
        deadline = started + (self._settings.lease_ttl - self._settings.lease_margin).total_seconds()
        ttl = to_ms(self._settings.lease_ttl)
        commands = [RENEW_LEASE.command((lease.key,), (lease.owner, lease.epoch, ttl)) for lease in leases]
        own = self._keys.presence(self.member)
        commands.append(call(own) if client.is_cluster else ("PUBSUB", "NUMSUB", own))
        for each in joined:
            commands.append(("PEXPIRE", self._alive(each), ttl))
            commands.append(("SISMEMBER", self._keys.members(each.topic, each.group), self.member))
        replies = self._send(client, commands)
        for (lease, on_lost), reply in zip(leases.items(), replies, strict=False):
            if reply == OK:
                lease.prolong(deadline)
            elif not isinstance(reply, Exception):
                self._lost(lease, on_lost)
        troubles = [reply for reply in replies if isinstance(reply, Exception)]
        troubles += self._touch_all(client, touched, deadline)
        if troubles:  # only now: one node of a cluster may be away, and the others have been served
            raise troubles[0]
        listeners, *shown = replies[len(leases) :]
        if joined and listeners in (0, [own.encode(), 0]):
            self._presence.renew()
            client.reconsider()  # or the question went to a replica: it answers for itself only
        for each, *is_there in zip(joined, shown[0::2], shown[1::2], strict=True):
            if not all(is_there):  # last: a server out of memory refuses it, which must not cost what was renewed
                self._show(client, each, ttl)
            with suppress(InvalidStateError):  # whoever waited was cancelled
                each.confirmed.set_result(None)
        self._show_vitals(client, joined, ttl)

    def _show_vitals(self, client: BlockingClient, joined: list[Joined], ttl: int) -> None:
        """For people only: a server that is out of memory refuses it, and nothing depends on it."""
        report = self._vitals.report(monotonic())
        with self._writing:
            names = [self._keys.vitals(one.topic, one.group, self.member) for one in joined if self._is_in(one)]
            client.pipelined([("SET", name, report, "PX", ttl) for name in names])
        if self._loop is not None and not self._loop.is_closed():
            self._vitals.ask(self._loop, monotonic())

    def _is_in(self, joined: Joined) -> bool:
        return self._joined.get((joined.topic, joined.group)) is joined

    def _send(self, client: BlockingClient, commands: list[tuple[Any, ...]]) -> list[Any]:
        """One write for all. A server that has forgotten the script gets its source once."""
        replies = client.pipelined(commands)
        again = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if again:
            sources = [("EVAL", RENEW_LEASE.source, *commands[at][2:]) for at in again]
            for at, reply in zip(again, client.pipelined(sources), strict=True):
                replies[at] = reply
        return replies

    def _show(self, client: BlockingClient, joined: Joined, ttl: int) -> None:
        """Only what is missing is written: PEXPIRE works when the server is out of memory.

        The key before the set: whoever is in the set without a key is dead to the others.
        """
        with self._writing:
            if self._is_in(joined):
                client.execute_command("SET", self._alive(joined), joined.info, "PX", ttl)
                client.execute_command("SADD", self._keys.members(joined.topic, joined.group), self.member)
                client.execute_command("PUBLISH", self._keys.changes(joined.topic, joined.group), "")

    def _touch_all(self, client: BlockingClient, touched: list[Touched], deadline: float) -> list[Exception]:
        """Whatever the nodes have against it; one that does not answer is not asked again."""
        troubles: dict[BlockingClient, Exception] = {}
        for one in touched:
            node = client.node_for(one.stream)
            if node not in troubles:
                try:
                    self._touch(client, one, deadline)
                except (RedisError, OSError) as error:
                    troubles[node] = error
        return list(troubles.values())

    def _touch(self, client: BlockingClient, one: Touched, deadline: float) -> None:
        held = one.held()
        lost: list[bytes] = []
        try:
            for at in range(0, len(held), TOUCH_CHUNK):
                chunk = held[at : at + TOUCH_CHUNK]
                lost += TOUCH_MESSAGES.run(client, (one.stream,), (self.member, one.group, *chunk))
        except ResponseError as error:  # one stream without its group must not end the beat of all others
            log.warning("what is in hand of %s cannot be touched: %s", one.stream, error)
            return
        one.lease.prolong(deadline)
        if lost:
            log.debug("%d messages of %s are not ours any more", len(lost), one.stream)

    def _say_goodbye(self, topic: str, group: str) -> None:
        client = self._connector.blocking_client()
        try:
            with self._writing:
                client.execute_command("SREM", self._keys.members(topic, group), self.member)
                shown = self._keys.alive(topic, group, self.member), self._keys.vitals(topic, group, self.member)
                client.execute_command("DEL", *shown)
                client.execute_command("PUBLISH", self._keys.changes(topic, group), "")
        except (RedisError, OSError) as error:
            log.warning("%s leaves without goodbye: %s", self.member, error)
        finally:
            client.close()

    def _alive(self, joined: Joined) -> str:
        return self._keys.alive(joined.topic, joined.group, self.member)

    # -- into the loop --------------------------------------------------------------------------------------------

    def _lost(self, lease: Lease, on_lost: Callable[[Lease], None]) -> None:
        with self._lock:
            if self._leases.pop(lease, None) is None:
                return  # given back while the renewal was on its way
        log.warning("%r is lost", lease)
        lease.lose()
        self._call(lambda: on_lost(lease))

    def _announced(self, channel: str) -> None:
        """A change in one of our groups. Renewing at once also finds out whether a lease is still ours."""
        with self._lock:
            joined = [each for each in self._joined.values() if self._keys.changes(each.topic, each.group) == channel]
        self.poke()
        for each in joined:
            self._call(each.on_change)

    def _call(self, callback: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def __repr__(self) -> str:
        return f"<Beat {self.member} groups={len(self._joined)} leases={len(self._leases)}>"
