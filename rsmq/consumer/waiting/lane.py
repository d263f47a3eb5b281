"""A lane: one partition while this member reads it, with everything that it must forget when it no longer may."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rsmq.consumer.waiting.key_windows import KeyWindows
from rsmq.errors import ConfigError
from rsmq.heartbeat.lease import Lease
from rsmq.model.clock import monotonic
from rsmq.model.keys import Keys
from rsmq.model.message import Message
from rsmq.model.message_ref import MessageRef
from rsmq.model.stream_id import parse_stream_id
from rsmq.producer.output import Output

Collect = Callable[..., Coroutine[Any, Any, MessageRef]]
"""Takes message, lane, topic, payload and options."""
START: Final = b"0-0"
MOST_OUTGOING: Final = 2000
"""Messages whose outputs wait for the server, before nothing new is read."""
LONGEST_LOOK: Final = 10.0
"""Seconds between two looks at parked messages: so late is it seen that the server's clock was set back."""


@dataclass(slots=True)
class MessageOutputs:
    """The outputs of one message, in the order in which its handler has published them.

    `is_sent`: a call that settles them may have been executed. `letter`: the dead letter that the message becomes,
    which is stored like an output.
    """

    message: Message
    outputs: list[Output] = field(default_factory=list)
    is_sent: bool = False
    letter: Output | None = None

    @property
    def stored(self) -> list[Output]:
        """All that the settlement stores."""
        return self.outputs if self.letter is None else [self.letter, *self.outputs]


class Lane:
    """The state of one partition in this member.

    Messages: `in_flight` are the ids that were fetched and whose settlement is not confirmed; `done` those that were
    handled but not sent yet; `settling` are the batches of them that wait for a reply. `waiting` has an entry for each
    key that is taken, with the messages behind it; a key in `parked` waits for its retry, one in `held` for its rate.
    `raw_entries` counts the lane's `RawEntries` in the queue; there are some only while no key is taken. `undelivered`
    are those in flight that the server does not know as delivered: it has lost writes, and may use their ids again.

    Recovery: while `cursor` is not None, pending messages are taken over and nothing new is read. `recoveries` counts
    how often that began. `newest_held` is the newest entry that this member has received; None until everything that
    may have been delivered before is taken over.

    Outputs: `outputs` has those of messages that run or are done. In `outgoing` they wait for the answer of the script
    that settles their message, in order. `is_full`: a target has no room for the first of them. `collect` takes an
    output of a message that runs here.
    """

    __slots__ = (
        "ahead", "asking", "cancelled_key", "cancels", "cancels_key", "claims", "collect", "cursor", "dlq_key",
        "done", "errors_key", "group", "held", "idle_cursor", "in_flight", "is_full", "is_publishing", "is_quiet",
        "is_unsure_of_retries", "lease", "lease_key", "max_attempts", "newest_held", "outgoing", "outputs", "parked",
        "partition", "raw_entries", "recoveries", "retry_at", "retry_key", "running", "search_at", "settling", "stream",
        "topic", "undelivered", "untimed", "waiting", "windows",
    )  # fmt: skip

    def __init__(self, keys: Keys, topic: str, partition: int, group: str, lease: Lease) -> None:
        self.topic, self.partition, self.group, self.lease = topic, partition, group, lease
        self.stream = keys.stream(topic, partition)
        self.lease_key = keys.lease(topic, partition, group)
        self.retry_key = keys.retry(topic, partition, group)
        self.dlq_key = keys.dlq(topic, partition, group)
        self.errors_key = keys.errors(topic, partition, group)
        self.cancels_key = keys.cancels(topic, partition, group)
        self.cancelled_key = keys.cancelled(topic, partition, group)
        self.in_flight: set[bytes] = set()
        self.undelivered: set[bytes] = set()
        self.done: list[bytes] = []
        self.waiting: dict[bytes, deque[Message]] = {}
        self.parked: dict[bytes, Message] = {}
        self.held: dict[bytes | str, Message] = {}
        self.windows: KeyWindows | None = None
        self.asking: set[bytes] = set()
        self.cancels: set[bytes] = set()
        self.untimed: set[bytes] = set()  # parked, and their timers wait for the server
        self.claims = 0  # claims and unparkings on their way
        self.running = 0
        self.settling: list[list[bytes]] = []
        self.raw_entries = 0
        self.cursor: bytes | None = START
        self.recoveries = 0
        self.newest_held: bytes | None = None
        self.idle_cursor = START  # shared distribution: where the search for abandoned messages goes on,
        self.search_at = 0.0  # when (monotonic), if the server's clock was set,
        self.ahead: float | None = None  # and by how many seconds that clock is ahead of the monotonic one
        self.is_quiet = False
        self.is_unsure_of_retries = False  # a call for due retries has no reply: it may still come to the server
        self.outputs: dict[bytes, MessageOutputs] = {}
        self.outgoing: dict[bytes, MessageOutputs] = {}
        self.is_publishing = self.is_full = False
        self.collect: Collect | None = None
        self.max_attempts = 0  # of the handler's policy
        self.retry_at = 0.0  # monotonic: when to look for due retries (without key order)

    @property
    def epoch(self) -> str:
        """The fencing number of the lease; empty in shared distribution."""
        return self.lease.epoch

    @property
    def fence(self) -> int:
        """The epoch as a number; 0 in shared distribution."""
        return int(self.lease.epoch or 0)

    @property
    def run(self) -> int:
        """The group's run through this partition, as of the lease; 0 before the first reset."""
        return self.lease.run

    @property
    def is_readable(self) -> bool:
        """Whether new messages may be read from it now."""
        return self.cursor is None and not self.is_quiet and not self.is_full and len(self.outgoing) < MOST_OUTGOING

    def publish(
        self, message: Message, topic: str, payload: Any, options: Mapping[str, Any]
    ) -> Coroutine[Any, Any, MessageRef]:
        """Keep an output of a message until the message is settled."""
        if self.collect is None:
            raise ConfigError("message.publish works while a worker runs the handler of the message")
        return self.collect(message, self, topic, payload, options)

    @property
    def is_recovering(self) -> bool:
        """Whether pending messages are to be taken over now."""
        return self.cursor is not None and not self.is_quiet and not self.is_ahead

    @property
    def is_ahead(self) -> bool:
        """Whether messages are in flight that the server does not know as delivered."""
        self.undelivered &= self.in_flight
        return bool(self.undelivered)

    def receive(self, entry_ids: list[bytes]) -> bool:
        """Note what was read. False: some of it is in flight, because the group was reset or made again.

        Then this lane is over, as after a reset under a lease: what runs is cancelled, and all of it is taken over and
        handled again. Otherwise two handlers would run with the same message, and both would settle it.
        """
        known = len(self.in_flight)
        self.in_flight.update(entry_ids)
        if len(self.in_flight) - known < len(entry_ids):
            self.lease.lose()
            return False
        if self.newest_held is not None:  # otherwise others' messages may have been ours in a reply that was lost
            self.newest_held = entry_ids[-1]
        return True

    def undecided(self) -> set[bytes]:
        """The ids that must be pending in the server: fetched, and not being settled, as far as we know."""
        return self.in_flight.difference(self.done, self.asking, *self.settling)

    def look_for_retries(self, seconds: float) -> None:
        """Look for retries after so many seconds, or earlier."""
        self.retry_at = min(self.retry_at, monotonic() + min(seconds, LONGEST_LOOK))

    def restart_recovery(self, *, is_ours: bool = False) -> None:
        """Take over everything pending from the start, even if a page of a recovery is on its way.

        `is_ours`: all of it was delivered to this member. Otherwise other members may have started some of it, so none
        of it counts as unseen.
        """
        self.cursor = START
        self.recoveries += 1  # the reply that is on its way belongs to an older recovery: it must not move the cursor
        if not is_ours:
            self.newest_held = None

    def is_unseen(self, entry_id: bytes) -> bool:
        """Whether an entry was delivered to this member in a reply that got lost.

        Reads come in order, so such an entry is newer than all that arrived.
        """
        return self.newest_held is not None and parse_stream_id(entry_id) > parse_stream_id(self.newest_held)

    def __repr__(self) -> str:
        state = "quiet" if self.is_quiet else "recovering" if self.cursor is not None else "reading"
        counts = f"in_flight={len(self.in_flight)} parked={len(self.parked)}"
        return f"<Lane {self.topic}.{self.partition}/{self.group} {state} {counts}>"
