"""The heartbeat: one thread per process that keeps members alive, leases ours and our presence visible.

A thread with connections of its own, because a handler that blocks the event loop must not kill its member.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import anyio.to_thread
from redis.exceptions import NoScriptError, RedisError

from rsmq.clock import monotonic, to_ms
from rsmq.connect import BlockingClient, Connector
from rsmq.heartbeat.grip import Grip, Handful
from rsmq.heartbeat.lease import Lease
from rsmq.heartbeat.presence import Presence, call
from rsmq.heartbeat.signboard import Sign, Signboard
from rsmq.heartbeat.vitals import Vitals
from rsmq.keys import Keys
from rsmq.script import OK, RENEW_LEASE
from rsmq.settings import Settings

log = logging.getLogger("rsmq.heartbeat")

PAUSES = 5
LONGEST_PAUSE = 0.2
"""Seconds. After a beat that failed the next comes sooner: its time-out has taken a third of the lease already, and
what is left must do for a connection and all its answers."""


class Beat:
    """Renews everything of one member every `heartbeat_interval`.

    Renewal counts from its start: a lease is believed until `started + ttl - margin`. Whatever the server refuses is
    lost at once. The thread never dies of an error: it reports an outage once and tries again.
    """

    def __init__(self, connector: Connector, settings: Settings, keys: Keys, member: str) -> None:
        self.member = member
        self._settings, self._keys = settings, keys
        self._connector = connector
        self._ttl = to_ms(settings.lease_ttl)
        self._fresh = (settings.lease_ttl - settings.lease_margin - settings.heartbeat_interval / 2).total_seconds()
        self._signboard = Signboard(keys, member, self._ttl)
        self._grip = Grip(member)
        self._lock = threading.Lock()
        self._leases: dict[Lease, Callable[[Lease], None]] = {}
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
        sign = Sign(topic, group, json.dumps({"member": self.member, **info}), on_change)
        listening = self._presence.listen(self._keys.changes(topic, group))
        self._signboard.add(sign)
        self.poke()
        await asyncio.wrap_future(sign.confirmed)
        await asyncio.wrap_future(listening)

    async def leave(self, topic: str, group: str) -> None:
        """Say goodbye, so that the others rebalance at once."""
        if self._signboard.remove(topic, group):
            await anyio.to_thread.run_sync(self._say_goodbye, topic, group, abandon_on_cancel=True)

    def watch(self, lease: Lease, on_lost: Callable[[Lease], None]) -> None:
        """Renew a lease, at once if it took long to get; `on_lost` is called in the loop when the server refuses."""
        with self._lock:
            self._leases[lease] = on_lost
        if lease.deadline - monotonic() < self._fresh:
            self.poke()

    def forget(self, lease: Lease) -> None:
        """Do not renew it any more."""
        with self._lock:
            self._leases.pop(lease, None)

    def touch(self, stream: str, group: str, lease: Lease, held: Callable[[], list[bytes]]) -> None:
        """Keep messages in hand from looking abandoned; `held` is called from the thread."""
        self._grip.add(Handful(stream, group, lease, held))

    def untouch(self, stream: str, group: str) -> None:
        """Do not touch them any more."""
        self._grip.remove(stream, group)

    def fence(self) -> None:
        """Give up every lease locally: the others may believe that we are gone."""
        with self._lock:
            leases = dict(self._leases)
        for lease, on_lost in leases.items():
            self._lost(lease, on_lost)
        for handful in self._grip.handfuls:
            handful.lease.lose()

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
            leases = dict(self._leases)
        signs, handfuls = self._signboard.signs, self._grip.handfuls
        deadline = monotonic() + (self._settings.lease_ttl - self._settings.lease_margin).total_seconds()
        own = self._keys.presence(self.member)
        replies = self._send(client, [
            *(RENEW_LEASE.command((lease.key,), (lease.owner, lease.epoch, self._ttl)) for lease in leases),
            call(own) if client.is_cluster else ("PUBSUB", "NUMSUB", own),
            *self._signboard.questions(signs),
        ])  # fmt: skip
        for (lease, on_lost), reply in zip(leases.items(), replies, strict=False):
            if reply == OK:
                lease.prolong(deadline)
            elif not isinstance(reply, Exception):
                self._lost(lease, on_lost)
        troubles = [reply for reply in replies if isinstance(reply, Exception)]
        troubles += self._grip.touch(client, handfuls, deadline)
        if troubles:  # only now: one node of a cluster may be away, and the others have been served
            raise troubles[0]
        listeners, *shown = replies[len(leases) :]
        if signs and listeners in (0, [own.encode(), 0]):
            self._presence.renew()
            client.reconsider()  # or the question went to a replica: it answers for itself only
        self._signboard.answer(client, signs, shown)  # late: a server out of memory refuses it, which costs no lease
        self._tell_vitals(client, signs)

    def _tell_vitals(self, client: BlockingClient, signs: list[Sign]) -> None:
        self._signboard.tell(client, signs, self._vitals.report(monotonic()))
        if self._loop is not None and not self._loop.is_closed():
            self._vitals.ask(self._loop, monotonic())

    def _send(self, client: BlockingClient, commands: list[tuple[Any, ...]]) -> list[Any]:
        """One write for all. A server that has forgotten the script gets its source once."""
        replies = client.pipelined(commands)
        again = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if again:
            sources = [("EVAL", RENEW_LEASE.source, *commands[at][2:]) for at in again]
            for at, reply in zip(again, client.pipelined(sources), strict=True):
                replies[at] = reply
        return replies

    def _say_goodbye(self, topic: str, group: str) -> None:
        client = self._connector.blocking_client()
        try:
            self._signboard.take_down(client, topic, group)
        except (RedisError, OSError) as error:
            log.warning("%s leaves without goodbye: %s", self.member, error)
        finally:
            client.close()

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
        signs = [each for each in self._signboard.signs if self._keys.changes(each.topic, each.group) == channel]
        self.poke()
        for each in signs:
            self._call(each.on_change)

    def _call(self, callback: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def __repr__(self) -> str:
        return f"<Beat {self.member} groups={len(self._signboard.signs)} leases={len(self._leases)}>"
