"""Messages with a unique name: their commands, and what the replies mean. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any, Final

from rsmq.errors import PartitionSealed
from rsmq.model.log_names import name_in_log
from rsmq.model.message import entry_fields
from rsmq.model.unique import Holder, HolderState, Unique, can_be_extended, can_be_replaced, is_held
from rsmq.producer.batch import NEW, Answer, Batch, Fields, Full
from rsmq.redis.client.raw_connection import pack
from rsmq.redis.scripts import LOOK_AT_MESSAGE, OK, PUBLISH_UNIQUE, RESCHEDULE_DELAYED

log = logging.getLogger("rsmq.publish")

MOST_ATTEMPTS: Final = 1000
"""A holder that is parked without being pending is found up to so many attempts."""


@dataclass(slots=True, eq=False)
class Claim:
    """One message and its claim to a name. It is decided when it has an `answer`, after one or more writes.

    A write tries to store the message, or asks each group where `holder` is, or gives a delayed holder another due time
    (`extends`). `seen` is the holder that has ended before the next try, or that it replaces. `is_sent`: a try may have
    been executed, whose reply is not there; `was_sent`: before this one. `knows_id`: whether a message with its id and
    another key would be seen. `asked`: which partition in the ancestry of its batch is asked: after a resize a
    message that was published before it may have the name.
    """

    fields: Fields = field(repr=False)
    unique: Unique
    due: str
    knows_id: bool = True
    holder: Holder | None = None
    extends: bool = False
    seen: Holder | None = None
    replaces: bool = False
    is_sent: bool = False
    was_sent: bool = False
    answer: Answer | None = None
    asked: int = 0
    keeper: str = ""
    """The id of the message that keeps the name; empty: this one."""

    def go_on(self) -> None:
        """The partition that was asked is sealed, and no message there has the name. One that could be replaced keeps
        it: nothing can be stored there in its place."""
        if self.replaces:
            self.holder = self.seen
            self.leave()
        else:
            self.restart()
            self.is_sent = False
            self.asked += 1

    def restart(self) -> None:
        """Begin again: the name has another holder than the one that was looked at."""
        self.holder = None
        self.extends = False
        self.seen = None
        self.replaces = False

    def meet(self, holder: Holder) -> None:
        """A try has met another message."""
        if self.seen is not None and holder.record != self.seen.record:
            self.restart()
            return
        self.holder = holder
        is_timed = holder.till.isdigit() and self.unique.on_conflict != "replace"
        if is_timed or not holder.stream_id or not holder.groups:  # no group has to be asked
            self.decide([])

    def decide(self, states: list[HolderState]) -> None:
        """Go on by where the holder is: another try, or the other message keeps the name."""
        assert self.holder is not None
        holder = self.holder
        if not is_held(holder, states):
            self.holder = None
            self.seen = holder
            self.replaces = False
        elif self.unique.on_conflict == "replace" and can_be_replaced(holder, states):
            self.holder = None
            self.seen = holder
            self.replaces = True
        elif self.unique.on_conflict == "extend" and can_be_extended(holder, self.due):
            self.extends = True
        else:
            self.leave()

    def leave(self) -> None:
        """The other message keeps the name."""
        assert self.holder is not None
        self.answer = (False, None)
        self.keeper = self.holder.message_id.decode(errors="replace")


class Claims(Batch):
    """Messages with a unique name: stored unless another message holds it."""

    __slots__ = ()
    script = PUBLISH_UNIQUE
    encode = staticmethod(entry_fields)
    is_repeatable = True

    @staticmethod
    def fields_of(entry: Claim) -> Fields:
        return entry.fields

    def learn(self, before: Batch, message_id: str, entry: Claim) -> None:
        entry.restart()
        entry.answer = None
        entry.asked = 0

    def commands(self) -> list[bytes]:
        pairs = zip(self.ids, self.entries, strict=True)
        return [command for message_id, claim in pairs for command in self._commands(message_id, claim)]

    def _commands(self, message_id: str, claim: Claim) -> list[bytes]:
        """Those of one message: none if it is decided."""
        if claim.answer is not None:
            return []
        at, keys, unique, seen = (self.topic.name, self.ancestry[claim.asked]), self.keys, claim.unique, claim.seen
        if claim.holder is not None and claim.extends:
            names = [keys.delayed(*at), self.dedup(claim.holder.message_id.decode(errors="replace"))]
            return [pack(RESCHEDULE_DELAYED.command(names, (claim.holder.packed, claim.due, self.window_ms)))]
        if claim.holder is not None:
            return [
                self._look(at[1], group.decode(errors="replace"), claim.holder.stream_id)
                for group in claim.holder.groups
            ]
        claim.was_sent = claim.is_sent
        claim.is_sent = True
        is_last = claim.asked == len(self.ancestry) - 1
        limits = (self.topic.max_length, self.topic.on_full) if is_last else (0, "reject")
        names = [keys.stream(*at), self.dedup(message_id), keys.unique(*at), keys.delayed(*at)]
        groups: tuple[bytes, ...] = ()
        if claim.replaces and seen is not None:
            groups = seen.groups
            names.append(self.dedup(seen.message_id.decode(errors="replace")))
            names += [keys.cancels(*at, group.decode(errors="replace")) for group in groups]
        args = (
            *limits, self.window_ms, claim.due, unique.name, unique.till,
            seen.record if seen is not None else b"", "replace" if claim.replaces else "keep", message_id,
            len(groups), *groups, *claim.fields,
        )  # fmt: skip
        return [pack(self.script.command(names, args))]

    def _look(self, partition: int, group: str, stream_id: bytes) -> bytes:
        at, keys = (self.topic.name, partition, group), self.keys
        own = (keys.lease, keys.retry, keys.errors, keys.cancels, keys.cancelled)
        names = (keys.stream(*at[:2]), *[part(*at) for part in own])
        return pack(LOOK_AT_MESSAGE.command(names, (group, stream_id, "", MOST_ATTEMPTS, 0)))

    def read(self, replies: Sequence[Any]) -> tuple[int, bytes, Exception | None]:
        newest, troubles, left = b"", list[Exception](), iter(replies)
        for claim in self.entries:
            if claim.answer is not None:
                continue
            asked = claim.holder.groups if claim.holder is not None and not claim.extends else None
            own = list(islice(left, 1 if asked is None else len(asked)))
            error = next((each for each in own if isinstance(each, Exception)), None)
            is_before = isinstance(error, PartitionSealed) and claim.asked < len(self.ancestry) - 1
            if error is not None and is_before and claim.holder is None:
                claim.go_on()
            elif error is not None:
                troubles.append(error)
            elif claim.extends:
                claim.leave() if own[0][0] == OK else claim.restart()
            elif claim.holder is not None:
                claim.decide([HolderState.read(claim.holder.stream_id, each) for each in own])
            else:
                newest = self._take(claim, own[0], troubles) or newest
        decided = sum(1 for _ in takewhile(lambda claim: claim.answer is not None, self.entries))
        return decided, newest, troubles[0] if troubles else None

    def _take(self, claim: Claim, reply: list[Any], troubles: list[Exception]) -> bytes:
        """The reply to a try. Returns the id of the entry that it has stored, if it has stored one."""
        word, *rest = reply
        if word == b"DUPLICATE":
            claim.answer = (None if claim.was_sent else False, None)
            return b""
        if word == b"OK":
            claim.answer = NEW if claim.knows_id else (None, True)
            if len(rest) > 1:
                unique = self.keys.unique(self.topic.name, self.partition)
                name = name_in_log(claim.unique.name)
                log.warning("%s: replaced the record of %s, which rsmq cannot read", unique, name)
            return bytes(rest[0]) if b"-" in rest[0] else b""
        claim.is_sent = False
        if word == b"FULL":
            troubles.append(Full())
        else:
            claim.meet(Holder.read(rest))
        return b""
