"""What the handlers of one partition have published by their messages, until it is stored."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat
from operator import itemgetter
from typing import Final

from rsmq.model.batch_member import ANY_GROUP, BatchMember, Outcome
from rsmq.model.clock import monotonic
from rsmq.model.message import Message
from rsmq.producer.output import Output
from rsmq.redis.topics import Topic

MOST_OUTGOING: Final = 2000
"""Messages whose outputs wait for the server, before nothing new is read."""
MOST_MEMBERS: Final = 2 * MOST_OUTGOING
"""With more members in memory, and more than twice what is in flight, those are removed that have gone otherwise."""


@dataclass(slots=True)
class MessageOutputs:
    """The outputs of one message, in the order in which its handler has published them.

    `follows`: it is settled in one call with the message before it, whose outputs are those of both.
    `is_sent`: a call that settles them may have been executed. `letter`: the dead letter that the message becomes, and
    `record`: where it goes if it is handed on to a fallback topic; both are stored like an output. `member`: which
    member of a batch it is, `outcome` how it leaves the batch, and `added` what its handler has added to it. `result`:
    what its handler has returned, where that is kept. `has_notes`: its handler has kept steps, or progress.
    `on_stored` is called when the server has confirmed its settlement.
    """

    message: Message
    outputs: list[Output] = field(default_factory=list)
    is_sent: bool = False
    letter: Output | None = None
    record: Output | None = None
    follows: bool = False
    outcome: Outcome = "done"
    added: list[BatchMember] = field(default_factory=list)
    member: BatchMember | None = None
    on_stored: Callable[[], None] | None = None
    result: Output | None = None
    has_notes: bool = False

    def exchange(self, output: Output, other: Output) -> None:
        """Another one in its place, such as with a new name of its body."""
        self.outputs[self.outputs.index(output)] = other

    @property
    def is_handed_on(self) -> bool:
        """Whether its fallback's message goes on for it."""
        return self.record is not None

    @property
    def words(self) -> str | int:
        """How many outputs it has, for `settle_outputs.lua`; whether notes about it go (`n`), or into its dead letter
        (`l`); and of a member of a batch how it leaves the batch."""
        mark = "l" if self.letter is not None else "n" if self.has_notes else ""
        if self.member is None:
            return f"{len(self.stored)}{mark}" if mark else len(self.stored)
        added = " ".join(each.address for each in self.added)
        return f"{len(self.stored)}{mark}|{self.member.field}|{self.outcome}|{added}"

    @property
    def stored(self) -> list[Output]:
        """All that the settlement stores."""
        own = self.letter or self.record
        stored = self.outputs if own is None else [own, *self.outputs]
        return stored if self.result is None else [*stored, self.result]


class Outgoing:
    """The outputs of one lane. `kept` has those of messages that run or are done. In `waiting` they wait for the answer
    of the script that settles their message, in order. `is_full`: a target has no room for the first of them.
    `can_swap`: the next call may put one output of each message into its own full topic, which the message leaves.
    `can_swap_anywhere`: one output of the first message into any full topic, because topics wait for each other in a
    circle. `waits_for`: the topic that has no room, `full_since` (monotonic). `relay_waits_for`: on a cluster the topic
    that has no room for what has left, and waits in the out-stream. `members`: messages in flight that are members of a
    batch: their settlement says so.
    """

    __slots__ = (
        "can_swap", "can_swap_anywhere", "circle_until", "full_since", "is_full", "is_served", "kept", "members",
        "relay_waits_for", "waiting", "waits_for",
    )  # fmt: skip

    def __init__(self) -> None:
        self.kept: dict[bytes, MessageOutputs] = {}
        self.waiting: dict[bytes, MessageOutputs] = {}
        self.members: dict[bytes, BatchMember] = {}
        self.is_served = False
        self.is_full = False
        self.can_swap = False
        self.can_swap_anywhere = False
        self.circle_until = 0.0
        """Until when its topic counts as part of a circle that stands still (monotonic)."""
        self.waits_for = ""
        self.relay_waits_for = ""
        self.full_since = 0.0

    @property
    def has_room(self) -> bool:
        """Whether more messages may be handled."""
        return not self.is_full and len(self.waiting) < MOST_OUTGOING

    def add_member(self, entry_id: bytes, member: BatchMember, in_flight: Collection[bytes]) -> None:
        """A message that is, or will be, in flight is a member of a batch."""
        if len(self.members) > MOST_MEMBERS and len(self.members) > 2 * len(in_flight):
            newest = list(self.members)[-MOST_OUTGOING:]  # they may be on their way
            kept = {each for each in self.members if each in in_flight}.union(newest)
            self.members = {each: known for each, known in self.members.items() if each in kept}
        self.members[entry_id] = member

    def leave(self, entry_id: bytes) -> bool:
        """A script has ended it. Returns whether it was a member."""
        return self.members.pop(entry_id, None) is not None

    def leave_all(self, ids: Iterable[bytes]) -> bool:
        """A script has ended these. Returns whether there were members among them."""
        known = self.members
        before = len(known)
        deque(map(known.pop, ids, repeat(None)), maxlen=0)
        return len(known) < before

    def moved_member(self, message: Message, group: str | None) -> BatchMember | None:
        """As which member of its batch the message of a fallback goes on. Without a `group` any may end it."""
        known = self.members.get(message.entry_id)
        return None if known is None else known.in_group(group or ANY_GROUP)

    def end_as(self, message: Message, outcome: Outcome) -> None:
        """It was not handled: how it leaves its batch, if it is a member."""
        if message.entry_id in self.members:
            self.kept.setdefault(message.entry_id, MessageOutputs(message)).outcome = outcome

    def of(self, message: Message) -> MessageOutputs:
        """The outputs of a message, perhaps none so far."""
        return self.kept.get(message.entry_id) or MessageOutputs(message)

    def keep(self, entry: MessageOutputs, output: Output) -> None:
        """One more output of a message that runs."""
        entry.outputs.append(output)
        self.kept[entry.message.entry_id] = entry

    def keep_result(self, message: Message, result: Output) -> None:
        """The result of a message that is done, or that ends otherwise."""
        entry = self.of(message)
        entry.result = result
        self.kept[message.entry_id] = entry

    def note(self, message: Message) -> None:
        """The handler of a message that runs has kept something, which goes with its settlement."""
        entry = self.of(message)
        entry.has_notes = True
        self.kept[message.entry_id] = entry

    def forget(self, entry_id: bytes) -> None:
        """The attempt counts no more, nor does what it has published."""
        self.kept.pop(entry_id, None)

    def add_letter(self, entry_id: bytes, letter: Output, outcome: Outcome = "failed") -> None:
        """A message with outputs becomes a dead letter."""
        self.kept[entry_id].letter = letter
        self.kept[entry_id].outcome = outcome

    def hand_on(self, message: Message, output: Output, record: Output) -> None:
        """A message goes to the fallback topic: nothing else that it has published counts."""
        self.kept[message.entry_id] = MessageOutputs(message, [output], record=record)

    def is_handing_on(self, entry_id: bytes) -> bool:
        """Whether a message goes to the fallback topic, and the server has not confirmed it yet."""
        entry = self.kept.get(entry_id) or self.waiting.get(entry_id)
        return entry is not None and entry.is_handed_on

    def settle_in_order(self, message: Message) -> None:
        """A message is settled after those with outputs that are done before it, also if it has none."""
        self.kept.setdefault(message.entry_id, MessageOutputs(message))

    def when_stored(self, entry_id: bytes, call: Callable[[], None]) -> bool:
        """Call this when the settlement of a message with outputs is confirmed. False: it is. If the lease ends before,
        it is never called."""
        entry = self.kept.get(entry_id) or self.waiting.get(entry_id)
        if entry is None:
            return False
        entry.on_stored = call
        return True

    def join(self, messages: Sequence[Message]) -> None:
        """Messages are settled in one call: the outputs of all of them belong to the first."""
        entries = [self.of(each) for each in messages]
        outputs = [output for entry in entries for output in entry.outputs]
        if outputs or any(each.result is not None or each.has_notes for each in entries):
            for each in entries:  # what it has added, its result and its notes are its own
                each.outputs = outputs if each is entries[0] else []
                each.follows = each is not entries[0]
                self.kept[each.message.entry_id] = each

    def route(self, entries: Iterable[MessageOutputs], topics: Mapping[str, Topic]) -> None:
        """These topics were resized: what was to go to a sealed partition goes to the one that follows."""
        for entry in entries:
            entry.outputs = [
                each.routed(topics[each.topic]) if each.topic in topics else each for each in entry.outputs
            ]

    def release(self, done: Sequence[bytes]) -> list[bytes]:
        """Messages are done: those with outputs wait for the server now. Returns these."""
        ready = [entry_id for entry_id in done if entry_id in self.kept]
        for entry_id in ready:
            self.waiting[entry_id] = entry = self.kept.pop(entry_id)
            known = self.members.pop(entry_id, None)
            if known is not None and not entry.is_handed_on:
                entry.member = known
        return ready

    def fields_of(self, ids: Iterable[bytes]) -> list[str]:
        """Which of these are which members: the field `batch` of each, or an empty text."""
        known = self.members
        return [known[each].field if each in known else "" for each in ids]

    def blocks_of(self, ids: Iterable[bytes]) -> list[str]:
        """Which members are among these: a field `batch` for each block, with the numbers of all of them."""
        found = defaultdict[str, list[int]](list)
        for block, run in groupby(filter(None, map(self.members.get, ids)), itemgetter(0)):
            found[block.front] += map(itemgetter(1), run)
        return [f"{front} {' '.join(map(str, numbers))}" for front, numbers in found.items()]

    def serve(self) -> bool:
        """Whether a task must be started for what waits. It says `rest` at its end."""
        was_served, self.is_served = self.is_served, True
        return not was_served

    def rest(self) -> None:
        """No task serves it any more."""
        self.is_served = False
        self.is_full = False

    def send(self, entries: Iterable[MessageOutputs]) -> None:
        """A call with these leaves: it may be executed, also if no task waits for its answer."""
        for entry in entries:
            entry.is_sent = True

    def stored(self, ids: Iterable[bytes], unsent: Iterable[MessageOutputs]) -> None:
        """The server has answered: these are stored, and the call did nothing for the others."""
        for entry_id in ids:
            self.waiting.pop(entry_id, None)
        for entry in unsent:
            entry.is_sent = False

    def note_full(self, is_full: bool, topic: str = "") -> None:
        """Whether the target of the first of them has no room, and which topic that is."""
        if topic != self.waits_for:
            self.waits_for = topic
            self.full_since = monotonic()
        self.is_full = is_full

    def note_relay(self, topic: str) -> None:
        """The topic for which all of the out-stream waits; empty if some of it was moved."""
        self.relay_waits_for = topic

    def stands(self, seconds: float) -> bool:
        """Whether the same topic has had no room for so long. The time begins anew then."""
        has_stood = bool(self.waits_for) and monotonic() - self.full_since >= seconds
        if has_stood:
            self.full_since = monotonic()
        return has_stood

    def circle(self, seconds: float) -> None:
        """Its topic is part of a circle that stands still: that counts for so long."""
        self.circle_until = monotonic() + seconds

    @property
    def is_in_circle(self) -> bool:
        """Whether that counts now."""
        return monotonic() < self.circle_until

    def swap(self, can_swap: bool, *, anywhere: bool = False) -> None:
        """Whether the next call may."""
        self.can_swap = can_swap
        self.can_swap_anywhere = can_swap and anywhere

    def take_all(self) -> list[Message]:
        """Give up what waits. Returns the messages."""
        messages = [entry.message for entry in self.waiting.values()]
        self.waiting.clear()
        return messages

    def __repr__(self) -> str:
        return f"<Outgoing kept={len(self.kept)} waiting={len(self.waiting)}{' full' if self.is_full else ''}>"
