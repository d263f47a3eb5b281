"""Where a message is: plain dataclasses, and how they follow from what the server says. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

from rsmq.dlq import DeadLetter
from rsmq.model.clock import LATEST_MS, from_epoch_ms
from rsmq.model.delivery_state import DeliveryState
from rsmq.model.failed_attempt import FailedAttempt, failed_attempts
from rsmq.model.message import Message, becomes_dead, remaining_ms
from rsmq.model.progress import MessageProgress, read_progress
from rsmq.model.record import text, whole
from rsmq.model.stream_id import parse_stream_id
from rsmq.model.words import count, number

State = Literal["delayed", "stored", "cancelled", "removed", "archived", "unknown"]
GroupState = Literal[
    "unread",
    "waiting_for_key",
    "waiting_for_turn",
    "waiting_for_rate",
    "waiting_for_permit",
    "held",
    "ready",
    "running",
    "waiting_for_retry",
    "waiting_for_time",
    "settled",
    "dead",
    "handed_on",
    "cancelled",
    "not_addressed",
]

MOST_BEFORE: Final = 10_000
"""Unread messages before one that are counted; `before` is not greater."""


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """Where a message is for one group.

    - `unread`: no member has it yet; `before` messages are delivered first.
    - `waiting_for_key`: `member` has it, and `behind`, an earlier message of its key, is not done.
    - `waiting_for_turn`: it waits for the turn of `tenant`. If its member has not answered: for that or for a rate; it
      has provably not started.
    - `waiting_for_rate`, `waiting_for_permit`: it waits for the rate, or a permit, of `name`; None: of the handler.
    - `held`: nothing of `name` starts until `until`; an empty name is all messages of the group.
    - `ready`: it starts when a slot is free.
    - `running`: in the hands of `member` since `since`: it runs; its handler may wait for a permit of `name`. If its
      member has not answered: or it starts next.
    - `waiting_for_retry`: attempt `attempt` failed with `error`; the next one is due at `due`.
    - `waiting_for_time`: `member` has it and has not started it: its handler's `when` lets it start at `due`.
    - `settled`: this group is done with it. If `expired` is a time, it was handled before then, or dropped: the server
      keeps nothing that tells which.
    - `dead`: a dead letter, with `reason` and `error`; `letter` is its id for `rsmq dlq replay`.
    - `handed_on`: it failed for good, by `reason`, and went to the fallback topic `to_topic`, as the message `to_id`.
      Known of the last 10 000 of a partition and group.
    - `cancelled`: not handled, and it will not be.
    - `not_addressed`: a replayed dead letter of another group.

    What a message waits for is known to its member, which is asked, and has half a second to answer. `before`: how many
    messages of its partition that wait for the same thing start before it; `tenant`: in whose flow. `until` of an
    unread message: all messages of the group are held until then.

    `attempt` counts the attempts that are charged. `error` is that of the last failed one. `failed` has the attempts
    that were followed by a retry, oldest first, at most the last ten; those of a dead letter come before its `error`.
    `expired`: since when no attempt may start. `progress`: what its handler has said of it last (`message.progress`).
    """

    group: str
    state: GroupState
    before: int | None = None
    member: str | None = None
    since: datetime | None = None
    behind: str | None = None
    attempt: int | None = None
    due: datetime | None = None
    reason: str | None = None
    error: str | None = None
    letter: str | None = None
    failed: tuple[FailedAttempt, ...] = ()
    expired: datetime | None = None
    name: str | None = None
    tenant: str | None = None
    until: datetime | None = None
    to_topic: str | None = None
    to_id: str | None = None
    progress: MessageProgress | None = None

    @property
    def text(self) -> str:
        """The state in this group, as a sentence."""
        many = "at least " if self.before == MOST_BEFORE else ""
        until = f"{self.until:%Y-%m-%d %H:%M:%S} UTC" if self.until is not None else ""
        last = f"; the last attempt failed: {self.error}" if self.error else ""
        if self.progress is not None:
            last = f"; {self.progress}, it said at {self.progress.at:%Y-%m-%d %H:%M:%S} UTC{last}"
        if self.expired is not None:
            last += f"; it expired at {self.expired}, so it does not start any more"
        match self.state:
            case "unread":
                held = f"; all messages of the group are held until {until}" if until else ""
                return f"unread, {many}{count(self.before or 0, 'message')} before it{held}{last}"
            case "waiting_for_key":
                behind = self.behind or count(self.before or 0, "message")
                return f"waits behind {behind} of its key, in the hands of {self.member} since {self.since}{last}"
            case "waiting_for_turn":
                what = "waits for a rate or for its turn" if self.before is None else "waits for its turn"
                return f"{what}{self._flow_text}{last}"
            case "waiting_for_rate":
                return f"waits for the rate of {self.name or 'the handler'}{self._flow_text}{last}"
            case "waiting_for_permit":
                return f"waits for a permit of {self.name or 'the group'}{self._flow_text}{last}"
            case "held":
                return (
                    f"held{f' until {until}' if until else ''} by {self.name or 'all messages'}{self._flow_text}{last}"
                )
            case "ready":
                return f"ready: it starts when a slot is free{self._flow_text}{last}"
            case "running":
                permit = "" if self.name is None else f"; its handler waits for a permit of {self.name}"
                return f"in the hands of {self.member} since {self.since}, attempt {self.attempt}{permit}{last}"
            case "waiting_for_retry":
                return f"waits for its retry at {self.due}, after attempt {self.attempt}{last}"
            case "waiting_for_time":
                return f"waits until {self.due}, in the hands of {self.member}: it has not started{last}"
            case "dead":
                return f"dead letter {self.letter}, {self.reason}: {self.error}"
            case "handed_on":
                tries = count(self.attempt or 0, "attempt")
                return f"{self.reason} after {tries}, handed on to the fallback topic {self.to_topic} as {self.to_id}"
            case "cancelled":
                return "cancelled"
            case "not_addressed":
                return "a replayed dead letter of another group"
        return "settled" if self.expired is None else f"settled or expired: its time was over at {self.expired}"

    @property
    def _flow_text(self) -> str:
        """Where a message that has not started stands."""
        flow = "" if self.tenant is None else f", in the flow of {self.tenant}"
        before = "" if self.before is None else f", {number(self.before)} before it"
        return f"{flow}{before}, in the hands of {self.member}: it has not started"


@dataclass(frozen=True, slots=True)
class MessageStatus:
    """Where a message is.

    - `delayed`: not in the stream before `due`.
    - `cancelled`: it was delayed, and was cancelled for all groups.
    - `stored`: in the stream, as `stream_id`; `groups` has the rest.
    - `removed`: retention has removed it, or it was never stored: its id is older than all that is there.
    - `archived`: removed, and found in the `archive` (`rsmq trace --archive`).
    - `unknown`: not found.

    `id` is the message id, also if it was found by its stream id. `partition` is None as long as nothing is found.
    `batch`: the name of the batch of which it is a member, as long as the batch is kept.
    """

    id: str
    topic: str | None
    state: State
    partition: int | None = None
    key: str | None = None
    stream_id: str | None = None
    due: datetime | None = None
    groups: tuple[GroupStatus, ...] = ()
    archive: str | None = None
    batch: str | None = None

    def group(self, name: str) -> GroupStatus | None:
        """The status for one group, or None."""
        return next((each for each in self.groups if each.group == name), None)

    @property
    def text(self) -> str:
        """The state of the message as a sentence, without the groups."""
        where = f"{self.topic}.{self.partition}"
        match self.state:
            case "delayed":
                return f"delayed until {self.due}, for {where}"
            case "stored":
                return f"stored in {where} as {self.stream_id}"
            case "cancelled":
                return f"cancelled while it was delayed, for {where}"
            case "archived":
                return f"removed by retention; in the archive as {self.stream_id} of {where}, in {self.archive}"
            case "removed":
                return (
                    "not there: the time in its id is before all that retention has kept, so it was removed, or never "
                    "stored, or its publisher's clock is wrong by more than 15 hours"
                )
        return "not found: it was never stored, or the clock of its publisher is wrong by more than 15 hours"


class Report(NamedTuple):
    """The reply of `look_at_message.lua`."""

    now: bytes
    delivered: bytes
    member: bytes
    idle_ms: int
    deliveries: int
    parked_attempts: int
    due: bytes
    note: bytes
    behind: bytes
    owner: bytes
    mark: bytes
    past: bytes = b""
    waits: bytes = b""
    progress: bytes = b""


def group_status(group: str, stream_id: bytes, report: Report, *, behind: str = "") -> GroupStatus:
    """The state that a reply means. `behind` is asked for separately, and counts only where it applies."""
    status = _state_status(group, stream_id, report, behind)
    return replace(status, progress=read_progress(report.progress)) if report.progress else status


def _state_status(group: str, stream_id: bytes, report: Report, behind: str) -> GroupStatus:
    failed = failed_attempts(report.note, report.past)
    error = failed[-1].error if failed else None
    is_waiting = report.parked_attempts >= 0 or parse_stream_id(stream_id) > parse_stream_id(report.delivered)
    if report.mark in (b"done", b"cancelled") or (report.mark and is_waiting):  # it does not start any more
        return GroupStatus(group, "cancelled", error=error, failed=failed)
    if parse_stream_id(stream_id) > parse_stream_id(report.delivered):
        return GroupStatus(group, "unread", before=0, failed=failed)
    if report.waits and int(report.waits) > 0:
        return GroupStatus(
            group, "waiting_for_time", member=text(report.member), attempt=report.deliveries, error=error,
            due=moment(report.waits), failed=failed,
        )  # fmt: skip
    if report.parked_attempts >= 0:
        due, member = moment(report.due), text(report.member) or text(report.owner)
        is_its = bool(failed) and failed[-1].attempt == report.parked_attempts
        return GroupStatus(
            group, "waiting_for_retry", member=member or None, attempt=report.parked_attempts, due=due,
            error=error if is_its else None, failed=failed,
        )  # fmt: skip
    if not report.member:
        return GroupStatus(group, "settled", failed=failed)
    since = moment(report.now) - timedelta(milliseconds=report.idle_ms)
    state: GroupState = "waiting_for_key" if behind else "running" if report.deliveries else "waiting_for_turn"
    return GroupStatus(
        group, state, member=text(report.member), since=since, attempt=report.deliveries, behind=behind or None,
        error=error, failed=failed,
    )  # fmt: skip


ASKED: Final = ("waiting_for_key", "waiting_for_turn", "running")
"""States of which the member that has the message knows more than the server."""


def as_member_says(status: GroupStatus, said: DeliveryState | None) -> GroupStatus:
    """With what the member has said; None: nothing."""
    if said is None:
        return status
    until = None if said.until_ms is None else from_epoch_ms(min(said.until_ms, LATEST_MS))
    return replace(
        status, state=said.state, before=said.before, name=said.name, tenant=said.tenant, until=until,
    )  # fmt: skip


STARTABLE: Final = (
    "unread", "waiting_for_key", "waiting_for_turn", "waiting_for_rate", "waiting_for_permit", "held", "ready",
    "waiting_for_retry", "waiting_for_time", "settled",
)  # fmt: skip
"""States in which an expired message does not start any more, or is settled."""


def expired(message: Message, status: GroupStatus, now_ms: int) -> datetime | None:
    """When the time of a message was over, if that is so and decides what becomes of it for a group.

    A running attempt goes on. An expired message that becomes a dead letter is one, or was settled before.
    """
    left = remaining_ms(message, now_ms)
    if left is None or left > 0 or status.state not in STARTABLE:
        return None
    return None if status.state == "settled" and becomes_dead(message) else message.expires


def dead_status(group: str, letter: DeadLetter, failed: tuple[FailedAttempt, ...] = ()) -> GroupStatus:
    """The status of a message that is a dead letter. `failed`: for a letter of a version that had no history."""
    return GroupStatus(
        group, "dead", attempt=letter.attempts, reason=letter.reason, error=letter.error, letter=letter.id,
        since=letter.at, member=letter.member or None, failed=letter.history or failed,
    )  # fmt: skip


def handed_on_status(group: str, record: Mapping[bytes, bytes], failed: tuple[FailedAttempt, ...] = ()) -> GroupStatus:
    """The status of a message that went to a fallback topic, from the fields of its record."""
    attempts, topic, to = (record.get(name, b"") for name in (b"attempts", b"topic", b"to"))
    return GroupStatus(
        group, "handed_on", attempt=whole(text(attempts)) or 0, reason=text(record.get(b"reason", b"failed")),
        to_topic=text(topic), to_id=text(to), failed=failed,
    )  # fmt: skip


def moment(ms: bytes) -> datetime:
    """Milliseconds of the server as a time, at most the year 9999."""
    return from_epoch_ms(min(max(0, int(ms)), LATEST_MS))


def removed_or_unknown(sent_ms: int | None, firsts: Sequence[Any]) -> State:
    """Of a message that was not found. `firsts`: of each partition where it could be, the stream id from which on
    nothing was removed, or empty."""
    if sent_ms is None or not firsts:  # its partition does not exist
        return "unknown"
    oldest = [parse_stream_id(first)[0] for first in firsts if first]
    return "removed" if not oldest or sent_ms < min(oldest) else "unknown"
