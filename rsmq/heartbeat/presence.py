"""Presence: a subscription that only this process holds. When the process dies, its sockets close, and the other
members see that the channel has no subscriber, long before a time to live runs out.

On a cluster the channel is a sharded one: the node of its slot counts its subscribers for every member that asks.
Changes of a group are published to all nodes, so the same connection receives them.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from typing import Any, Final

from redis.exceptions import RedisError

from rsmq.model.clock import monotonic
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Connector

log = logging.getLogger("rsmq.presence")

REPLY_TIMEOUT: Final = 0.2
"""Longest wait for a reply, or for the rest of a message, before the thread checks its other tasks, in seconds."""
POLL_INTERVAL: Final = 0.2
"""Seconds between two checks where the connection does not show its socket (redis-py's private name has changed)."""
PING_INTERVAL: Final = 1.0
RESTING: Final = 0.05
"""Seconds between two looks whether the connection is needed again."""
SEEN_AFTER: Final = 1.5
"""Graces for which a subscription must have lasted, so that each member has seen it: after a gap of a grace between two
looks a member counts from the start. The rest is for slow replies."""


class Wakeup:
    """Lets one thread wait for a connection while any other thread can end that wait.

    A pair of sockets beside the connection: the waiting thread waits for both. A `wake` while no thread waits ends the
    next wait; several of them count as one.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def wake(self) -> None:
        """End the wait. From any thread, also after `close`."""
        with suppress(OSError):  # the buffer is full: earlier calls have not been read yet
            self._writer.send(b"\0")

    def wait(self, connection: Any, seconds: float) -> bool:
        """Until the connection has something to read (True), `wake` was called, or the time is over."""
        if connection.can_read(timeout=0):  # some of it may have been read from the socket already
            return True
        readable = getattr(connection, "_sock", None)
        if readable is None:
            return bool(connection.can_read(timeout=min(seconds, POLL_INTERVAL)))
        with selectors.PollSelector() as selector:
            selector.register(readable, selectors.EVENT_READ)
            selector.register(self._reader, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(seconds)}
        if self._reader in ready:
            with suppress(BlockingIOError):
                self._reader.recv(4096)
        return readable in ready

    def close(self) -> None:
        """Close both sockets; no thread may wait any more."""
        self._reader.close()
        self._writer.close()

    def __repr__(self) -> str:
        return f"<Wakeup {'closed' if self._reader.fileno() < 0 else 'open'}>"


class Presence:
    """Holds the subscription in a thread of its own and passes on the changes announced in the member's groups.

    If the subscription breaks and cannot be restored within the grace, other members may take over: `on_absent` is
    called, which must stop all work, and is called again at each failed attempt until the subscription is restored.
    `is_absent` until then; `absences` counts how often that began. The grace begins when the thread last began a look
    that showed no break: in a process that was paused, the break may be as old as the pause.

    The other members look from time to time. A subscription that was restored for a short time may lie between two
    looks: then they count from the break before it, and so does this one.
    """

    def __init__(
        self,
        connector: Connector,
        settings: Settings,
        keys: Keys,
        member: str,
        on_change: Callable[[str], None],
        on_absent: Callable[[], None],
        on_question: Callable[[str, bytes], None] = lambda _channel, _question: None,
        on_missed: Callable[[str], None] | None = None,
    ) -> None:
        """`on_change` gets the channel of a group, and so does `on_missed` (by default it is `on_change`) after an
        interruption, in which changes may have been missed. `on_question` gets what is published with data, and its
        channel."""
        self._connector = connector
        self._keys = keys
        self._member = member
        self._on_change, self._on_absent = on_change, on_absent
        self._on_question = on_question
        self._on_missed = on_missed or on_change
        self._grace = settings.presence_grace.total_seconds() * 0.8
        self._lock = threading.Lock()
        self._wanted: dict[str, Future[None]] = {keys.presence(member): Future()}
        self._subscribed: set[str] = set()
        self._is_needed = True
        self._resubscribe_wanted = threading.Event()
        self._absence_timer: threading.Timer | None = None
        self.is_absent = False
        self.absences = 0
        self._ran_at = 0.0
        self._restored_at = 0.0
        self._interrupted_at: float | None = None
        self._seen_after = settings.presence_grace.total_seconds() * SEEN_AFTER
        self._longest_wait = min(PING_INTERVAL, self._grace / 6 or PING_INTERVAL)  # `_ran_at` is at most twice so old
        self._ending = threading.Event()
        self._wakeup: Wakeup | None = None
        self._thread = threading.Thread(target=self._run, name=f"rsmq-presence-{member}", daemon=True)

    @property
    def absent_for(self) -> float:
        """Seconds since the subscription broke, if the others may take this member for dead, else 0."""
        since = self._interrupted_at
        return 0.0 if since is None or not self.is_absent else monotonic() - since

    def start(self) -> None:
        """Subscribe and stay subscribed."""
        self._wakeup = Wakeup()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ending.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def listen(self, channel: str) -> Future[None]:
        """Subscribe to another channel; the future is done when the server has confirmed it."""
        with self._lock:
            future = self._wanted.setdefault(channel, Future())
            self._is_needed = True
        self._wake()
        return future

    def rest(self) -> None:
        """Close the connection until the next `listen`, of a member that is in no group."""
        with self._lock:
            self._wanted = {self._keys.presence(self._member): Future()}
            self._is_needed = False
        self._wake()

    def renew(self) -> None:
        """Subscribe again: the server that the other members ask counts no subscriber."""
        self._resubscribe_wanted.set()
        self._wake()

    def _wake(self) -> None:
        """To be called after the change that the thread has to see: it checks first and waits then."""
        if self._wakeup is not None:
            self._wakeup.wake()

    def _run(self) -> None:
        assert self._wakeup is not None
        with closing(self._wakeup) as wakeup:
            while not self._ending.is_set():
                if not self._is_needed:
                    self._ending.wait(RESTING)
                    continue
                self._ran_at = monotonic()
                try:
                    with closing(self._connector.blocking_client()) as client:
                        pubsub = client.node_for(self._keys.presence(self._member)).subscriber()
                        self._subscribed.clear()
                        self._subscribe(pubsub)
                        self._resubscribe_wanted.clear()
                        self._restored()
                        self._listen(pubsub, wakeup)
                except (RedisError, OSError) as error:
                    self._broken(error)
                    self._ending.wait(0.05)
                except Exception as error:  # the subscription has ended all the same
                    log.exception("unexpected error in the presence of %s", self._member)
                    self._broken(error)
                    self._ending.wait(0.5)
            if self._absence_timer is not None:
                self._absence_timer.cancel()

    def _broken(self, error: Exception) -> None:
        """The timer has a thread of its own: the next connection attempt may hang for longer than the grace."""
        if self._absence_timer is None:
            log.info("the presence of %s is interrupted: %s", self._member, error)
            if self._interrupted_at is None or self._ran_at - self._restored_at >= self._seen_after:
                self._interrupted_at = self._ran_at
            left = self._interrupted_at + self._grace - monotonic()
            self._absence_timer = threading.Timer(max(0.0, left), self._be_absent)
            self._absence_timer.daemon = True
            if self._grace > 0 and left > 0:
                self._absence_timer.start()
            elif self._grace > 0:
                self._be_absent()
        elif self._grace > 0 and not self._absence_timer.is_alive():
            self._be_absent()

    def _be_absent(self) -> None:
        with self._lock:
            if self._absence_timer is None:
                return  # restored at this moment
            self.absences += not self.is_absent
            self.is_absent = True
        self._on_absent()

    def _restored(self) -> None:
        """Announcements made in between were missed, so every group counts as changed."""
        self._restored_at = monotonic()
        with self._lock:
            timer = self._absence_timer
            self._absence_timer = None
            self.is_absent = False
        if timer is None:
            return
        timer.cancel()
        for channel in sorted(self._subscribed):
            self._on_missed(channel)

    def _subscribe(self, pubsub: Any) -> None:
        """Subscribe to the channels that are not confirmed yet; returns when all are."""
        with self._lock:
            wanted = [channel for channel in self._wanted if channel not in self._subscribed]
        if not wanted:
            return
        self._ran_at = monotonic()
        own = self._keys.presence(self._member)
        if self._connector.is_cluster and own in wanted:
            pubsub.ssubscribe(own)
            others = [channel for channel in wanted if channel != own]
        else:
            others = wanted
        if others:
            pubsub.subscribe(*others)
        while not self._subscribed.issuperset(wanted):
            self._take(pubsub.get_message(timeout=REPLY_TIMEOUT))
            if self._ending.is_set():
                return

    def _listen(self, pubsub: Any, wakeup: Wakeup) -> None:
        pinged = heard = monotonic()
        is_there = False
        while not self._ending.is_set() and self._is_needed:
            if self._resubscribe_wanted.is_set():
                raise OSError("the server that other members ask does not have the subscription")
            self._subscribe(pubsub)
            before = now = monotonic()
            # what has come before a break is read before the break is seen: it says nothing about now
            is_behind = is_there and bool(pubsub.connection.can_read(timeout=0))
            is_there = wakeup.wait(pubsub.connection, min(self._longest_wait, max(0.0, pinged + PING_INTERVAL - now)))
            message = pubsub.get_message(timeout=REPLY_TIMEOUT) if is_there else None
            now = monotonic()
            if message is not None:
                heard = now
                self._take(message)
            elif now - pinged >= PING_INTERVAL:
                if heard < pinged - 3 * PING_INTERVAL:
                    raise OSError("no reply on the subscription")
                pubsub.ping()
                pinged = now
            if not is_behind:  # the connection was looked at since: a pause before that would have shown a break
                self._ran_at = before

    def _take(self, message: Any) -> None:
        if message is None:
            return
        channel = message["channel"].decode() if isinstance(message["channel"], bytes) else str(message["channel"])
        if message["type"] in ("unsubscribe", "sunsubscribe"):
            raise OSError("the slot of the channel has moved")
        if message["type"] in ("subscribe", "ssubscribe"):
            self._subscribed.add(channel)
            with self._lock:
                future = self._wanted.get(channel)
            if future is not None and not future.done():
                future.set_result(None)
        elif message["type"] == "message" and message["data"]:
            self._on_question(channel, message["data"])
        elif message["type"] == "message":
            self._on_change(channel)
