"""A lane: one partition while this member reads it, with everything that it must forget when it no longer may."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Final, Protocol

from rsmq.consumer.waiting.flows import Flows
from rsmq.consumer.waiting.key_windows import KeyWindows
from rsmq.consumer.waiting.outgoing import Outgoing
from rsmq.consumer.waiting.recovery import Recovery
from rsmq.consumer.waiting.seam import NOTHING, Left, Seam
from rsmq.errors import ConfigError
from rsmq.heartbeat.lease import Lease
from rsmq.model.batch_member import ANY_GROUP, BatchMember
from rsmq.model.keys import Keys
from rsmq.model.layout import NORMAL
from rsmq.model.message import AnyPermit, AnyStep, Message
from rsmq.model.message_ref import MessageRef
from rsmq.model.stream_id import parse_stream_id

MOST_RETRIED: Final = 1000
"""Messages that have started again, of which the lane remembers which are in flight."""


class MessageNotes(Protocol):
    """What a handler may keep about a message that it runs with, until that is settled."""

    def want_result(self) -> None: ...
    def progress(self, message: Message, lane: Lane, done: float, text: str) -> Coroutine[Any, Any, None]: ...
    def step(self, message: Message, lane: Lane, name: str) -> AnyStep: ...


class MessageLimits(Protocol):
    """What a handler may ask of its limits, for a message that it runs with."""

    def permit(self, message: Message, name: str) -> AnyPermit: ...
    def spent(self, message: Message, number: int) -> None: ...


Collect = Callable[..., Coroutine[Any, Any, MessageRef]]
"""Takes message, lane, topic, payload and options."""


class Lane:
    """The state of one partition in this member.

    `in_flight` are the ids that were fetched and whose settlement is not confirmed; `done` those that were handled but
    not sent yet; `settling` are the batches of them that wait for a reply; a script about a message in `asking` is on
    its way. `cancels` are those that are to be cancelled and run.

    Its parts: `lease` says how long it is ours, `recovery` how far it has taken over what was delivered before, `flows`
    what waits and for what, `outgoing` what its handlers have published. `windows` are the starts of its keys, if these
    have a rate.
    """

    __slots__ = (
        "_collect",
        "asking",
        "band",
        "calls_key",
        "cancelled_key",
        "cancels",
        "cancels_key",
        "deployment",
        "dlq_key",
        "done",
        "errors_key",
        "flows",
        "followers",
        "group",
        "in_flight",
        "is_quiet",
        "lease",
        "lease_key",
        "limits",
        "max_attempts",
        "notes",
        "outgoing",
        "parents",
        "partition",
        "progress_key",
        "recovery",
        "retried",
        "retry_key",
        "seam",
        "settling",
        "steps_key",
        "stream",
        "topic",
        "waits_key",
        "windows",
    )  # fmt: skip

    def __init__(
        self,
        keys: Keys,
        topic: str,
        partition: int,
        group: str,
        lease: Lease,
        band: str = NORMAL,
        parents: tuple[int, ...] = (),
    ) -> None:
        self.deployment = keys.prefix  # what the marks in a service's database belong to
        self.topic = topic
        self.partition = partition
        self.band = band
        self.group = group
        self.lease = lease
        self.stream = keys.stream(topic, partition)
        self.lease_key = keys.lease(topic, partition, group)
        self.retry_key = keys.retry(topic, partition, group)
        self.waits_key = keys.waits(topic, partition, group)
        self.calls_key = keys.calls(topic, partition, group)
        self.dlq_key = keys.dlq(topic, partition, group)
        self.errors_key = keys.errors(topic, partition, group)
        self.steps_key = keys.steps(topic, partition, group)
        self.progress_key = keys.progress(topic, partition, group)
        self.cancels_key = keys.cancels(topic, partition, group)
        self.cancelled_key = keys.cancelled(topic, partition, group)
        self.in_flight: set[bytes] = set()
        self.done: list[bytes] = []
        self.settling: list[list[bytes]] = []
        self.asking: set[bytes] = set()
        self.cancels: set[bytes] = set()
        self.retried: dict[bytes, int] = {}
        """Messages that have started again here, with the attempts charged before."""
        self.is_quiet = False
        self.parents = parents
        """Partitions that this one follows, whose messages come first: nothing is read while they are not finished,
        unless there is a seam."""
        self.seam: Seam | None = None
        self.followers: tuple[Lane, ...] = ()
        """Lanes that go on behind this one."""
        self.recovery = Recovery()
        self.flows = Flows()
        self.outgoing = Outgoing()
        self.windows: KeyWindows | None = None
        self.max_attempts = 0
        self._collect: Collect | None = None
        self.limits: MessageLimits | None = None
        self.notes: MessageNotes | None = None

    # -- what it is -----------------------------------------------------------------------------------------------

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
        is_ours = self.recovery.is_over and not self.is_quiet
        return is_ours and not (self.parents and self.is_blocked) and self.outgoing.has_room

    @property
    def is_recovering(self) -> bool:
        """Whether pending messages are to be taken over now."""
        if self.recovery.is_over or self.is_quiet:
            return False
        return not (self.parents and self.is_blocked) and not self.is_ahead

    @property
    def is_blocked(self) -> bool:
        """Whether nothing may be read because of the partitions that this one follows."""
        return bool(self.parents) and (self.seam is None or not self.seam.is_open(self.recovery))

    @property
    def is_ahead(self) -> bool:
        """Whether messages are in flight that the server does not know as delivered."""
        undelivered = self.recovery.undelivered
        undelivered &= self.in_flight
        return bool(undelivered)

    # -- its life -------------------------------------------------------------------------------------------------

    def serve(
        self,
        collect: Collect,
        max_attempts: int,
        limits: MessageLimits | None = None,
        notes: MessageNotes | None = None,
    ) -> None:
        """A handler with so many attempts serves it; `collect` takes an output of a message that runs here, `limits`
        gives it permits, and `notes` keeps its steps and its progress."""
        self.limits = limits
        self.notes = notes
        self._collect = collect
        self.max_attempts = max_attempts

    def quiet(self) -> None:
        """Read and start nothing new."""
        self.is_quiet = True

    def follow(self) -> tuple[bytes, ...]:
        """The partitions before it are finished, under this lease. Returns the keys that waited for these."""
        keys = () if self.seam is None else self.seam.keys
        self.parents = ()
        self.seam = None
        self.lease.bind(())
        return keys

    def go_on(self, before: Sequence[Lane], left: Left = NOTHING) -> Seam:
        """All keys of the partitions before it are known here. Those that are taken there are taken here, too."""
        seam = self.seam = Seam(before, left)
        self.lease.bind([each.lease for each in before])
        for each in before:
            each.add_follower(self)
        for key in seam.keys:
            self.flows.take_before(key)
        return seam

    def add_follower(self, lane: Lane) -> None:
        """Another lane goes on behind this one."""
        self.followers = (*[each for each in self.followers if each.follows(self)], lane)

    def follows(self, lane: Lane) -> bool:
        """Whether it goes on behind another one."""
        return self.seam is not None and lane.partition in self.parents and self.lease.is_held()

    def meets(self, entry_ids: Collection[bytes]) -> bool:
        """Whether what comes from the server may be handled. False: this lane is over, and so are those that go on
        behind it. A message was not known here when they did, and theirs of the same key may run."""
        new = [entry_id for entry_id in entry_ids if entry_id not in self.in_flight]
        if not new or all(each.expects(self, new) for each in self.followers if each.follows(self)):
            return True
        self.lease.lose()
        return False

    def expects(self, lane: Lane, entry_ids: Collection[bytes]) -> bool:
        """Whether it goes on behind another lane and has waited for these messages of it."""
        return self.seam is not None and self.seam.expects(lane, entry_ids)

    def wake(self) -> None:
        """Read on: what was handed back is taken over again."""
        self.recovery.restart()
        self.is_quiet = False

    def publish(
        self, message: Message, topic: str, payload: Any, options: Mapping[str, Any]
    ) -> Coroutine[Any, Any, MessageRef]:
        """Keep an output of a message until the message is settled."""
        if self._collect is None:
            raise ConfigError("message.publish works while a worker runs the handler of the message")
        return self._collect(message, self, topic, payload, options)

    def publish_member(
        self, message: Message, topic: str, payload: Any, options: Mapping[str, Any]
    ) -> Coroutine[Any, Any, MessageRef]:
        """Keep an output that is a member of the batch of its message."""
        if self._collect is None:
            raise ConfigError("message.batch.publish works while a worker runs the handler of the message")
        return self._collect(message, self, topic, payload, options, is_member=True)

    def join(self, message: Message, member: BatchMember) -> None:
        """A message that was made here is a member of a batch: its settlement says so, if that counts."""
        group = member.block.group
        if (group == self.group or group == ANY_GROUP) and (
            message.addressee is None or message.addressee == self.group.encode()
        ):
            self.outgoing.add_member(message.entry_id, member, self.in_flight)

    def want_result(self) -> None:
        """The result of a message that was made here is to be kept."""
        if self.notes is not None:
            self.notes.want_result()

    def progress(self, message: Message, done: float, text: str) -> Coroutine[Any, Any, None]:
        """How far the handler of a message that runs here has come."""
        if self.notes is None:
            raise ConfigError("message.progress works while a worker runs the handler of the message")
        return self.notes.progress(message, self, done, text)

    def step(self, message: Message, name: str) -> AnyStep:
        """A part of the handler of a message that runs here."""
        if self.notes is None:
            raise ConfigError(f"message.step({name!r}) works while a worker runs the handler of the message")
        return self.notes.step(message, self, name)

    def permit(self, message: Message, name: str) -> AnyPermit:
        """Permission for a call of the handler of a message that runs here."""
        if self.limits is None:
            raise ConfigError(
                f"the handler has no permit {name!r}: write @broker.handler(..., permits={{{name!r}: Rate(100)}})"
            )
        return self.limits.permit(message, name)

    def spent(self, message: Message, number: int) -> None:
        """What a message that runs here really costs."""
        if self.limits is None:
            raise ConfigError("the handler counts no cost: write @broker.handler(..., rate=Rate(..., cost=...))")
        self.limits.spent(message, number)

    def has_outputs(self, entry_id: bytes) -> bool:
        """Whether the handler of a message that runs here has published by it."""
        entry = self.outgoing.kept.get(entry_id)
        return entry is not None and bool(entry.outputs)

    def windows_of(self, limit: int, seconds: float) -> KeyWindows:
        """The starts of its keys, under a rate by key."""
        if self.windows is None:
            self.windows = KeyWindows(limit, seconds)
        return self.windows

    # -- messages -------------------------------------------------------------------------------------------------

    def receive(self, entry_ids: list[bytes]) -> bool:
        """Note what was read. False: some of it is in flight, or waits as an id: the group was reset or made again.

        Then this lane is over, as after a reset under a lease: what runs is cancelled, and all of it is taken over and
        handled again. Otherwise two handlers would run with the same message, and both would settle it.
        """
        known = len(self.in_flight)
        if self.followers and not self.meets(entry_ids):
            return False
        self.in_flight.update(entry_ids)
        is_again = self.flows.far and parse_stream_id(entry_ids[0]) <= self.flows.newest
        if is_again or len(self.in_flight) - known < len(entry_ids):
            self.lease.lose()
            return False
        self.recovery.receive(entry_ids[-1])
        return True

    def undecided(self) -> set[bytes]:
        """The ids that must be pending in the server: fetched, and not being settled, as far as we know."""
        return self.in_flight.difference(self.done, self.asking, *self.settling)

    @property
    def startable(self) -> int:
        """How many of its messages are in memory and count against the prefetch bound of its band: all but those that
        wait for a retry or a rate, with what is behind them."""
        settled = len(self.done) + sum(map(len, self.settling))
        return len(self.in_flight) - settled - self.flows.blocked - len(self.flows.emptied)

    def forget(self, ids: Collection[bytes]) -> None:
        """These are settled, or another member's."""
        self.in_flight.difference_update(ids)

    def note_cancels(self, ids: Collection[bytes]) -> None:
        """These run, and are to be cancelled."""
        self.cancels &= self.in_flight
        self.cancels.update(ids)

    def note_retry(self, entry_id: bytes, attempts: int) -> None:
        """A message starts again, after so many attempts."""
        if len(self.retried) > MOST_RETRIED and len(self.retried) > 2 * len(self.in_flight):
            self.retried = {each: known for each, known in self.retried.items() if each in self.in_flight}
        self.retried[entry_id] = attempts

    def parked_members(self, ids: Collection[bytes]) -> list[bytes]:
        """Under which members of the retry set these were parked before they started again."""
        return [b"%b|%d" % (each, self.retried[each]) for each in ids if each in self.retried]

    # -- what is done ---------------------------------------------------------------------------------------------

    def take_done(self) -> list[bytes]:
        """What is done leaves with a batch; `confirmed` or `put_back_done` must follow."""
        taken = self.done
        self.settling.append(taken)
        self.done = []
        return taken

    def divert_done(self) -> list[bytes]:
        """Messages with outputs leave by calls of their own. Returns these."""
        ready = self.outgoing.release(self.done)
        if ready:
            self.asking.update(ready)
            taken = set(ready)
            self.done = [entry_id for entry_id in self.done if entry_id not in taken]
        return ready

    def drop_done(self) -> None:
        """The lease is lost: the next owner handles them again."""
        self.done = []

    def put_back_done(self, ids: list[bytes]) -> None:
        """A batch has no reply: it is settled again."""
        self.done[:0] = ids
        self.settling.remove(ids)

    def confirmed(self, ids: list[bytes]) -> None:
        """A batch has its reply."""
        self.settling.remove(ids)

    def __repr__(self) -> str:
        state = "quiet" if self.is_quiet else "reading" if self.recovery.is_over else "recovering"
        state = f"behind {self.parents}" if self.is_blocked else state
        counts = f"in_flight={len(self.in_flight)} parked={len(self.flows.parked)}"
        return f"<Lane {self.topic}.{self.partition}/{self.group} {state} {counts}>"
