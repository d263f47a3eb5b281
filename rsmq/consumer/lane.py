"""A lane: one partition while this member reads it, with everything that must be forgotten when it no longer may."""

from __future__ import annotations

from collections import deque
from typing import Final

from rsmq.entry import place
from rsmq.heartbeat.lease import Lease
from rsmq.keys import Keys
from rsmq.message import Message

START: Final = b"0-0"


class Lane:
    """The state of one partition in this member.

    Invariants: `held` are the ids that this member has in its hands (fetched, not yet confirmed as settled); `done` are
    those handled but not yet sent, `settling` counts the batches of them without a reply yet; `waiting` has an entry
    for every key that is being handled, with the messages behind it in order; a key in `parked` waits for its retry;
    `parking` are those that are being put aside, without an answer yet;
    `stretches` of entries that nobody has looked at are in the queue, only while no key is taken.
    While `cursor` is not None, pending messages are being taken over, and nothing new is read.
    `newest` is the last entry that was in our hands; None until all is taken over that may have been there before.
    """

    __slots__ = (
        "begun", "cursor", "dlq_key", "done", "group", "held", "idle_cursor", "is_quiet", "lease", "lease_key",
        "newest", "parked", "parking", "partition", "retry_at", "retry_key", "running", "settling", "stream",
        "stretches", "topic", "waiting",
    )  # fmt: skip

    def __init__(self, keys: Keys, topic: str, partition: int, group: str, lease: Lease) -> None:
        self.topic, self.partition, self.group, self.lease = topic, partition, group, lease
        self.stream = keys.stream(topic, partition)
        self.lease_key = keys.lease(topic, partition, group)
        self.retry_key = keys.retry(topic, partition, group)
        self.dlq_key = keys.dlq(topic, partition, group)
        self.held: set[bytes] = set()
        self.done: list[bytes] = []
        self.waiting: dict[bytes, deque[Message]] = {}
        self.parked: dict[bytes, Message] = {}
        self.parking: set[bytes] = set()
        self.running = 0
        self.settling = 0
        self.stretches = 0
        self.cursor: bytes | None = START
        self.begun = 0
        self.newest: bytes | None = None
        self.idle_cursor = START  # shared distribution: where the search for abandoned messages goes on
        self.is_quiet = False
        self.retry_at = 0.0  # monotonic: when to look for due retries (without key order)

    @property
    def epoch(self) -> str:
        """The fencing number of the lease; empty in shared distribution."""
        return self.lease.epoch

    @property
    def is_readable(self) -> bool:
        """Whether new messages may be read from it now."""
        return self.cursor is None and not self.is_quiet

    def begin_anew(self, *, is_ours: bool = False) -> None:
        """Go through all that is pending once more, also while a page of it is on its way.

        Unless `is_ours`, there may be what others have started: then nothing of it counts as unseen.
        """
        self.cursor = START
        self.begun += 1  # a page that is on its way says where to go on: not any more
        if not is_ours:
            self.newest = None

    def is_unseen(self, entry_id: bytes) -> bool:
        """Whether an entry that was delivered to us has never arrived: reads come in order, so it is newer than all."""
        return self.newest is not None and place(entry_id) > place(self.newest)

    def __repr__(self) -> str:
        state = "quiet" if self.is_quiet else "recovering" if self.cursor is not None else "reading"
        return (
            f"<Lane {self.topic}.{self.partition}/{self.group} {state} held={len(self.held)} parked={len(self.parked)}>"
        )
