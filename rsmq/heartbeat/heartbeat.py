"""The heartbeat: one thread per process that renews leases, heartbeat keys and messages in flight.

The thread has connections of its own: a handler that blocks the event loop must not kill its member.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio.to_thread
from redis.exceptions import RedisError, ResponseError

from rsmq.heartbeat.lease import Lease
from rsmq.heartbeat.loop_lag import LoopLag
from rsmq.heartbeat.presence import Presence
from rsmq.heartbeat.registration import GroupMembership, OnNews, Registration
from rsmq.model.clock import awake, monotonic, to_ms
from rsmq.model.keys import Keys
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.member import MISSED, news_in, request_in
from rsmq.model.own_process import about_process, memory_bytes
from rsmq.model.reason import lost_body
from rsmq.model.settings import Settings, heartbeat_interval, lease_margin
from rsmq.redis.client.connector import BlockingClient, Connector, translate
from rsmq.redis.pubsub import probe
from rsmq.redis.scripts import OK, TOUCH_MESSAGES, Value

log = logging.getLogger("rsmq.heartbeat")

RETRIES_PER_INTERVAL = 5
LONGEST_PAUSE = 0.2
"""Seconds. A failed heartbeat is repeated early: its time-out has taken a third of the lease, and what is left must
suffice for a new connection and all replies."""
TOUCH_CHUNK = 500


@dataclass(slots=True)
class InFlightMessages:
    """The messages that a member has in flight in one partition under shared distribution.

    The thread calls `in_flight`. `on_gone` is called in the loop, with the ids that another member has now and those of
    deleted entries, which are in the dead letters.
    """

    stream: str
    group: str
    lease: Lease
    dead_letters: str
    in_flight: Callable[[], list[bytes]]
    on_gone: Callable[[list[bytes], list[bytes]], None]


class Heartbeat:
    """Renews everything of one member every `heartbeat_interval`.

    A renewal counts from its start: a lease is believed until `started + ttl - margin`. What the server refuses is lost
    at once. No error ends the thread: it logs an outage once and tries again.
    """

    def __init__(
        self,
        connector: Connector,
        settings: Settings,
        keys: Keys,
        member: str,
        on_request: Callable[[str], None] = lambda _word: None,
    ) -> None:
        """`on_request` is called in the loop when an operator wants this member to end: QUIET or STOP."""
        self.member = member
        self._on_request = on_request
        self._settings, self._keys = settings, keys
        self._connector = connector
        self._ttl = to_ms(settings.lease_ttl)
        self._fresh = (settings.lease_ttl - lease_margin(settings) - heartbeat_interval(settings) / 2).total_seconds()
        self._registration = Registration(keys, member, self._ttl)
        self._lock = threading.Lock()
        self._leases: dict[Lease, Callable[[Lease], None]] = {}
        self._in_flight: dict[tuple[str, str], InFlightMessages] = {}
        self._throttled_log = ThrottledLog(log)
        self._renewal_wanted = threading.Event()
        self._ending = threading.Event()
        self._is_needed = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=f"rsmq-heartbeat-{member}", daemon=True)
        self._presence = Presence(
            connector, settings, keys, member, self._on_change, self.fence, self._on_question, self._on_missed
        )
        self._loop_lag = LoopLag()
        self._about = about_process(settings.app_version)
        self._is_out = False
        self.last_confirmed = monotonic()  # read by other threads
        self.trouble = ""
        """Why the last renewal failed; empty if it did not. Read by other threads."""

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start both threads; callbacks are called in `loop`."""
        self._loop = loop
        self._thread.start()
        self._presence.start()

    def stop(self) -> None:
        """End both threads. Blocks for at most a second longer than the command in progress."""
        self._ending.set()
        self._renewal_wanted.set()
        self._presence.stop()
        self._thread.join(timeout=5)

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    @property
    def is_absent(self) -> bool:
        """Whether the other members may take this one for dead: what it took now they could take away at once."""
        return self._presence.is_absent

    @property
    def absent_for(self) -> float:
        """For how many seconds."""
        return self._presence.absent_for

    @property
    def absences(self) -> int:
        """How often that has begun."""
        return self._presence.absences

    def works_since(self, topic: str, group: str) -> float | None:
        """`awake` since when the server has renewed this member of a group without failure; None: it does not now. On
        a cluster that is the node of the group: others may be away."""
        return self._registration.works_since(topic, group)

    def rest(self) -> None:
        """Close the connections of both threads until the next `join`, if this member is in no group and has no lease:
        the server has too few connections for all who want some."""
        with self._lock:
            is_idle = not (self._leases or self._in_flight or self._registration.memberships)
        if is_idle:
            self._is_needed = False
            self._presence.rest()
            self.renew_now()

    def renew_now(self) -> None:
        """Renew everything now."""
        self._renewal_wanted.set()

    # -- what to keep alive ---------------------------------------------------------------------------------------

    async def join(
        self,
        topic: str,
        group: str,
        info: Mapping[str, object],
        on_change: Callable[[], None],
        vitals: Callable[[], Mapping[str, object]] = dict,
        on_question: Callable[[bytes], None] = lambda _question: None,
        on_news: OnNews | None = None,
    ) -> None:
        """Become a member; returns when the other members can see this one. The callbacks: see `GroupMembership`;
        without `on_news` all that is said is a change."""
        about = json.dumps({"member": self.member, **self._about, **info})
        membership = GroupMembership(
            topic, group, about, on_change, vitals, on_question, on_news or (lambda *_: on_change())
        )
        self._is_needed = True
        for channel in (self._keys.presence(self.member), self._keys.changes(topic, group)):
            await asyncio.wrap_future(self._presence.listen(channel))  # first: the others count its silence
        self._registration.add(membership)
        self.renew_now()
        await asyncio.wrap_future(membership.confirmed)

    def tell(self, topic: str, group: str, **about: object) -> None:
        """Say something else about this member of a group: others read it with the heartbeat key."""
        for each in self._registration.memberships:
            if (each.topic, each.group) == (topic, group):
                each.tell(**about)
                self.renew_now()

    async def leave(self, topic: str, group: str) -> None:
        """Withdraw from the group, so that the other members rebalance at once."""
        if self._registration.remove(topic, group):
            await anyio.to_thread.run_sync(self._withdraw, topic, group, abandon_on_cancel=True)

    def renew(self, lease: Lease, on_lost: Callable[[Lease], None]) -> None:
        """Keep a lease renewed. `on_lost` is called in the loop when the server refuses.

        The first renewal comes at once if taking the lease took long.
        """
        with self._lock:
            self._leases[lease] = on_lost
        if lease.deadline - monotonic() < self._fresh:
            self.renew_now()

    def forget(self, lease: Lease) -> None:
        """Stop renewing it."""
        with self._lock:
            self._leases.pop(lease, None)

    def touch(self, messages: InFlightMessages) -> None:
        """Keep messages in flight from becoming idle enough to be claimed."""
        with self._lock:
            self._in_flight[messages.stream, messages.group] = messages

    def stop_touching(self, stream: str, group: str) -> None:
        """Stop touching them."""
        with self._lock:
            self._in_flight.pop((stream, group), None)

    def fence(self) -> None:
        """Give up every lease locally: other members may take this one for dead."""
        with self._lock:
            leases, in_flight = dict(self._leases), list(self._in_flight.values())
        for lease, on_lost in leases.items():
            self._lost(lease, on_lost)
        for each in in_flight:
            each.lease.lose()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        client: BlockingClient | None = None
        interval = heartbeat_interval(self._settings).total_seconds()
        while not self._ending.is_set():
            self._renewal_wanted.clear()
            if not self._is_needed:
                if client is not None:
                    client.disconnect()
                self._renewal_wanted.wait(interval)
                continue
            try:
                if client is None:  # in here: an error of it must not end the thread
                    client = self._connector.blocking_client()
                self._renew_all(client)
                self.last_confirmed = monotonic()
                self.trouble = ""
                if self._is_out:
                    log.info("the heartbeat of %s works again", self.member)
                self._is_out = False
                self._renewal_wanted.wait(interval)
            except (RedisError, OSError) as error:
                (log.debug if self._is_out else log.warning)("the heartbeat of %s fails: %s", self.member, error)
                self._is_out = True
                self.trouble = str(translate(error, self._connector.url))
                if client is not None:
                    client.disconnect()  # it may lead to a server that is no longer the master
                self._ending.wait(min(interval / RETRIES_PER_INTERVAL, LONGEST_PAUSE))
            except Exception:
                log.exception("unexpected error in the heartbeat of %s", self.member)
                self._ending.wait(interval)
        if client is not None:
            client.close()

    def _renew_all(self, client: BlockingClient) -> None:
        """One exchange with each node: a lease counts from its start, so a slow answer must not be waited for twice."""
        with self._lock:
            leases, in_flight = dict(self._leases), list(self._in_flight.values())
        memberships = self._registration.memberships
        deadline = monotonic() + (self._settings.lease_ttl - lease_margin(self._settings)).total_seconds()
        own = self._keys.presence(self.member)
        touches = [list(self._touches(each)) for each in in_flight]
        renewals = [lease.renewal(self._ttl) for lease in leases]
        try:
            replies = client.pipelined([
                *renewals,
                *[touch for each in touches for touch in each],
                probe(own) if client.is_cluster else ("PUBSUB", "NUMSUB", own),
                *self._registration.renewals(memberships),
            ])  # fmt: skip
        except (RedisError, OSError):
            self._registration.missed()
            raise
        for (lease, on_lost), reply in zip(leases.items(), replies, strict=False):
            if reply == OK:
                lease.prolong(deadline)
            elif not isinstance(reply, Exception):
                self._lost(lease, on_lost)
        rest = iter(replies[len(leases) :])
        touched = [
            self._touched(each, [next(rest) for _ in some], deadline)
            for each, some in zip(in_flight, touches, strict=True)
        ]
        subscribers, *renewed = rest
        errors = [
            each for each in (*replies[: len(leases)], *touched, subscribers, *renewed) if isinstance(each, Exception)
        ]
        if errors:  # raised last: one node of a cluster may be away, and the other nodes have been served
            if client.is_cluster:  # what this member says about itself, such as that it cannot read at that node
                self._registration.confirm(client, memberships, renewed)
            else:
                self._registration.missed()
            raise errors[0]
        if memberships and subscribers in (0, [own.encode(), 0]):
            self._presence.renew()
            client.mark_stale()  # or a replica answered: it counts only its own subscribers
        # after the leases: a server out of memory refuses these writes, and that must cost no lease
        self._registration.confirm(client, memberships, renewed)
        self._registration.write_vitals(client, memberships, self._vitals())
        if self._loop is not None and not self._loop.is_closed():
            self._loop_lag.ask(self._loop, awake())

    def _vitals(self) -> dict[str, float]:
        """What holds for the whole process."""
        memory = memory_bytes()
        return self._loop_lag.report(awake()) | ({} if memory is None else {"memory_bytes": memory})

    def _touches(self, messages: InFlightMessages) -> Iterator[tuple[Value, ...]]:
        in_flight, names = messages.in_flight(), (messages.stream, messages.dead_letters)
        fixed = (self.member, messages.group, self._settings.dlq_length, *lost_body(messages.group, self.member))
        for at in range(0, len(in_flight), TOUCH_CHUNK):
            yield TOUCH_MESSAGES.command(names, (*fixed, *in_flight[at : at + TOUCH_CHUNK]))

    def _touched(self, messages: InFlightMessages, replies: Sequence[Any], deadline: float) -> Exception | None:
        """A touch that succeeds prolongs the lease of its partition; that lease exists only in this process.

        Returns the error of a node that did not answer.
        """
        error = next((reply for reply in replies if isinstance(reply, Exception)), None)
        if isinstance(error, ResponseError):  # a stream whose group is missing must not stop the others' renewal
            self._throttled_log.warn("messages in flight cannot be touched", f"{messages.stream}: {error}")
            return None
        if error is not None:
            return error
        messages.lease.prolong(deadline)
        taken, lost = [[entry_id for reply in replies for entry_id in reply[at]] for at in (0, 1)]
        if taken or lost:
            self._call(partial(messages.on_gone, taken, lost))
        return None

    def _withdraw(self, topic: str, group: str) -> None:
        try:
            with closing(self._connector.blocking_client()) as client:
                self._registration.withdraw(client, topic, group)
        except (RedisError, OSError) as error:
            log.warning("%s could not withdraw from %s/%s: %s", self.member, topic, group, error)

    # -- into the loop --------------------------------------------------------------------------------------------

    def _lost(self, lease: Lease, on_lost: Callable[[Lease], None]) -> None:
        with self._lock:
            if self._leases.pop(lease, None) is None:
                return  # released while the renewal was in progress
        log.warning("lost %r", lease)
        lease.lose()
        self._call(lambda: on_lost(lease))

    def _on_change(self, channel: str) -> None:
        """A change in one of the groups. Renewing at once also finds out whether each lease is still ours."""
        self.renew_now()
        for each in self._registration.memberships:
            if self._keys.changes(each.topic, each.group) == channel:
                self._call(each.on_change)

    def _on_missed(self, channel: str) -> None:
        """Changes in one of the groups may have been missed."""
        self.renew_now()
        for each in self._registration.memberships:
            if self._keys.changes(each.topic, each.group) == channel:
                self._call(partial(each.on_news, MISSED, ()))

    def _on_question(self, channel: str, question: bytes) -> None:
        """The members of one of the groups are asked something or told news, or one of them is to end."""
        request = request_in(question)
        if request is not None:
            word, member = request
            if member == self.member:
                self._call(partial(self._on_request, word))
            return
        news = news_in(question)
        for each in self._registration.memberships:
            if self._keys.changes(each.topic, each.group) == channel:
                self._call(partial(each.on_question, question) if news is None else partial(each.on_news, *news))

    def _call(self, callback: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def __repr__(self) -> str:
        return f"<Heartbeat {self.member} groups={len(self._registration.memberships)} leases={len(self._leases)}>"
