"""Presence: a subscription that only this process holds. When the process dies its sockets close, and the others see
that nobody listens any more, long before a time to live runs out.

On a cluster the subscription is a sharded one, on the node of the channel's slot: there everybody can ask for it. What
is announced in a group is published to all nodes, so the same connection hears it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from redis.exceptions import RedisError

from rsmq.clock import monotonic
from rsmq.connect import Client, Connector
from rsmq.heartbeat.bell import Bell
from rsmq.keys import Keys
from rsmq.settings import Settings

log = logging.getLogger("rsmq.presence")

ANSWER = 0.2
"""Longest wait for an answer, or for the rest of a message, before looking at what else is to do, in seconds."""
PING_EVERY = 1.0


async def listeners(client: Client, channels: Sequence[str]) -> list[int]:
    """How many listen on each of these channels."""
    if not channels:
        return []
    if not client.is_cluster:
        return list((await client.execute_command("PUBSUB", "NUMSUB", *channels))[1::2])
    counts = [reply[1] for reply in await _asked(client, [("PUBSUB", "SHARDNUMSUB", channel) for channel in channels])]
    # a node that has lost the slot counts nobody and does not say so: whoever seems to be gone is called,
    # and by the newest map, for a replica would answer for itself only
    silent = [channel for channel, count in zip(channels, counts, strict=True) if not count]
    if silent:
        client.reconsider()
    called = dict(zip(silent, await _asked(client, [call(channel) for channel in silent]), strict=True))
    return [count or called[channel] for channel, count in zip(channels, counts, strict=True)]


async def _asked(client: Client, questions: Sequence[tuple[str, ...]]) -> list[Any]:
    replies = await client.pipelined(questions)
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def call(channel: str) -> tuple[str, str, str]:
    """An empty message to a sharded channel. Its answer: how many have heard it, or who serves its slot now."""
    return ("SPUBLISH", channel, "")


class Presence:
    """Holds the subscription in a thread of its own, and passes on what is announced in our groups.

    If it is broken and cannot be renewed within the grace, the others may replace us: `on_absent` is called, which must
    stop all work, and again until it is renewed.
    """

    def __init__(
        self,
        connector: Connector,
        settings: Settings,
        keys: Keys,
        member: str,
        on_change: Callable[[str], None],
        on_absent: Callable[[], None],
    ) -> None:
        self._connector, self._keys, self._member = connector, keys, member
        self._on_change, self._on_absent = on_change, on_absent
        self._grace = settings.presence_grace.total_seconds() * 0.8
        self._lock = threading.Lock()
        self._wanted: dict[str, Future[None]] = {keys.presence(member): Future()}
        self._subscribed: set[str] = set()
        self._is_unseen = threading.Event()
        self._fuse: threading.Timer | None = None
        self._ending = threading.Event()
        self._bell: Bell | None = None
        self._thread = threading.Thread(target=self._run, name=f"rsmq-presence-{member}", daemon=True)

    def start(self) -> None:
        """Subscribe, and stay so."""
        self._bell = Bell()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ending.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def listen(self, channel: str) -> Future[None]:
        """Also listen to a channel; the future is done when the server has confirmed it."""
        with self._lock:
            future = self._wanted.setdefault(channel, Future())
        self._wake()
        return future

    def renew(self) -> None:
        """The server answers others that nobody listens: subscribe again, to the server that they ask."""
        self._is_unseen.set()
        self._wake()

    def _wake(self) -> None:
        """After whatever the thread looks at before it waits."""
        if self._bell is not None:
            self._bell.ring()

    def _run(self) -> None:
        assert self._bell is not None
        try:
            self._stay(self._bell)
        finally:
            self._bell.take_down()

    def _stay(self, bell: Bell) -> None:
        while not self._ending.is_set():
            client = self._connector.blocking_client()
            try:
                pubsub = client.node_for(self._keys.presence(self._member)).subscriber()
                self._subscribed.clear()
                self._subscribe(pubsub)
                self._is_unseen.clear()
                self._mended()
                self._listen(pubsub, bell)
            except (RedisError, OSError) as error:
                self._broken(error)
                self._ending.wait(0.05)
            except Exception:
                log.exception("the presence of %s met a defect", self._member)
                self._ending.wait(0.5)
            finally:
                client.close()
        if self._fuse is not None:
            self._fuse.cancel()

    def _broken(self, error: Exception) -> None:
        """The fuse burns in a thread of its own: the next connection may hang for longer than the grace."""
        if self._fuse is None:
            log.info("the presence of %s is interrupted: %s", self._member, error)
            self._fuse = threading.Timer(self._grace, self._on_absent)
            self._fuse.daemon = True
            if self._grace > 0:
                self._fuse.start()
        elif self._grace > 0 and not self._fuse.is_alive():
            self._on_absent()

    def _mended(self) -> None:
        """What was announced in between went past us, so it counts as announced now."""
        if self._fuse is None:
            return
        self._fuse.cancel()
        self._fuse = None
        for channel in sorted(self._subscribed):
            self._on_change(channel)

    def _subscribe(self, pubsub: Any) -> None:
        """Subscribe to what is wanted and not confirmed yet; returns when all of it is."""
        with self._lock:
            wanted = [channel for channel in self._wanted if channel not in self._subscribed]
        if not wanted:
            return
        own = self._keys.presence(self._member)
        if self._connector.is_cluster and own in wanted:
            pubsub.ssubscribe(own)
            others = [channel for channel in wanted if channel != own]
        else:
            others = wanted
        if others:
            pubsub.subscribe(*others)
        while not self._subscribed.issuperset(wanted):
            self._take(pubsub.get_message(timeout=ANSWER))
            if self._ending.is_set():
                return

    def _listen(self, pubsub: Any, bell: Bell) -> None:
        pinged = heard = monotonic()
        while not self._ending.is_set():
            if self._is_unseen.is_set():
                raise OSError("the server does not know the subscription")
            self._subscribe(pubsub)
            is_there = bell.wait(pubsub.connection, max(0.0, pinged + PING_EVERY - monotonic()))
            message = pubsub.get_message(timeout=ANSWER) if is_there else None
            now = monotonic()
            if message is not None:
                heard = now
                self._take(message)
            elif now - pinged >= PING_EVERY:
                if heard < pinged - 3 * PING_EVERY:
                    raise OSError("no answer on the subscription")
                pubsub.ping()
                pinged = now

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
        elif message["type"] == "message":
            self._on_change(channel)
