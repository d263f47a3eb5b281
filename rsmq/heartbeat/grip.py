"""The grip on what is in hand under shared distribution: touched with each heartbeat, so that nobody takes it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redis.exceptions import RedisError, ResponseError

from rsmq.complaint import Complaints
from rsmq.connect import BlockingClient
from rsmq.heartbeat.lease import Lease
from rsmq.script import TOUCH_MESSAGES

log = logging.getLogger("rsmq.heartbeat")

TOUCH_CHUNK = 500


@dataclass(slots=True)
class Handful:
    """What a member has in hand in one partition; `held` is called from the thread."""

    stream: str
    group: str
    lease: Lease
    held: Callable[[], list[bytes]]


class Grip:
    """All handfuls of a member. A touch that succeeds prolongs the lease of its partition, which only we know of."""

    def __init__(self, member: str) -> None:
        self._member = member
        self._complaints = Complaints(log)
        self._lock = threading.Lock()
        self._handfuls: dict[tuple[str, str], Handful] = {}

    @property
    def handfuls(self) -> list[Handful]:
        """Those that are to be touched now."""
        with self._lock:
            return list(self._handfuls.values())

    def add(self, handful: Handful) -> None:
        """Touch it from the next beat on."""
        with self._lock:
            self._handfuls[handful.stream, handful.group] = handful

    def remove(self, stream: str, group: str) -> None:
        """Touch it no more."""
        with self._lock:
            self._handfuls.pop((stream, group), None)

    def touch(self, client: BlockingClient, handfuls: Sequence[Handful], deadline: float) -> list[Exception]:
        """What the nodes have against it; one that does not answer is not asked again."""
        troubles: dict[BlockingClient, Exception] = {}
        for each in handfuls:
            node = client.node_for(each.stream)
            if node not in troubles:
                try:
                    self._touch(client, each, deadline)
                except (RedisError, OSError) as error:
                    troubles[node] = error
        return list(troubles.values())

    def _touch(self, client: BlockingClient, one: Handful, deadline: float) -> None:
        held = one.held()
        lost: list[bytes] = []
        try:
            for at in range(0, len(held), TOUCH_CHUNK):
                chunk = held[at : at + TOUCH_CHUNK]
                lost += TOUCH_MESSAGES.run(client, (one.stream,), (self._member, one.group, *chunk))
        except ResponseError as error:  # one stream without its group must not end the beat of all others
            self._complaints.say("what is in hand cannot be touched", f"{one.stream}: {error}")
            return
        one.lease.prolong(deadline)
        if lost:
            log.debug("%d messages of %s are not ours any more", len(lost), one.stream)

    def __repr__(self) -> str:
        return f"<Grip {self._member} partitions={len(self._handfuls)}>"
