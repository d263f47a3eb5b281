"""The commands of a member, made by the package itself: its roles run until they send, and what they send is taken."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from dataclasses import replace
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

from tenacity import wait_fixed

from rsmq.consumer.reading.read_ahead import ReadAhead
from rsmq.consumer.reading.reclaimer import Reclaimer
from rsmq.consumer.settling.outputs import Outputs
from rsmq.consumer.settling.settler import Settler
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.flows import IdPage
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.outgoing import MessageOutputs
from rsmq.handler.retry import Bury, Park, RetryPolicy
from rsmq.heartbeat.heartbeat import Heartbeat, InFlightMessages
from rsmq.heartbeat.lease import Lease, Leases
from rsmq.model.clock import monotonic, to_ms
from rsmq.model.keys import Keys
from rsmq.model.message import Message
from rsmq.model.page_limit import PageLimit
from rsmq.model.reason import Reason
from rsmq.model.settings import Settings
from rsmq.producer.output import Output
from rsmq.redis.scripts import REMOVE_CONSUMER, RENEW_LEASE, SETTLE_MESSAGES, SETTLE_OUTPUTS
from tests.interleavings.world import Command

KEYS: Final = Keys()
TOPIC, GROUP = "orders", "billing"
STREAM: Final = KEYS.stream(TOPIC, 0)
LEASE, RETRY, DLQ = KEYS.lease(TOPIC, 0, GROUP), KEYS.retry(TOPIC, 0, GROUP), KEYS.dlq(TOPIC, 0, GROUP)
TARGET: Final[Any] = SimpleNamespace(name="invoices", max_length=0)
OUT: Final = KEYS.stream(TARGET.name, 0)
DAY: Final = timedelta(days=1)
"""Leases and retries last so long that none ends by itself: time passes when the search says so."""
SETTINGS: Final = Settings(lease_ttl=DAY, prefetch=4)
POLICY: Final = RetryPolicy(max_attempts=2, wait=wait_fixed(DAY.total_seconds()))

Wire = tuple[Any, ...]
"""One command, as the server gets it."""


class Sent(BaseException):
    """Out of a role of the package: what it sends."""

    def __init__(self, command: Wire) -> None:
        self.command = command


class Recorder:
    """In place of a client: it answers with `replies`, and then the command that follows leaves as `Sent`."""

    is_cluster = False

    def __init__(self, *replies: Any) -> None:
        self._replies = list(replies)
        self.page_limit = PageLimit()

    async def execute_command(self, *command: Any) -> Any:
        if not self._replies:
            raise Sent(command)
        return self._replies.pop(0)


def sent(role: Coroutine[Any, Any, Any]) -> Wire:
    """The command that a role sends."""
    try:
        role.send(None)
    except Sent as sent:
        return sent.command
    raise AssertionError("it has sent nothing")


def stream_id(number: int) -> bytes:
    """The id of the n-th message."""
    return b"%d-0" % number


def number_of(entry_id: bytes) -> int:
    """The message that has this id."""
    return int(entry_id.partition(b"-")[0])


@cache
def wire(command: Command) -> Wire:
    """What the package sends for this."""
    make = globals()[f"_{command.kind}"]
    made: Wire = make(command, *command.args)
    return made


def _context(member: str, *replies: Any) -> ConsumerContext:
    handler: Any = SimpleNamespace(group=GROUP, retry=POLICY, when=None, by=None)
    client: Any = Recorder(*replies)
    topic: Any = SimpleNamespace(name=TOPIC, partitions=1, max_length=0, on_full="reject", trims=False)
    return ConsumerContext(client, KEYS, SETTINGS, member, topic, handler)


def _lane(command: Command, *numbers: int) -> Lane:
    lease = Lease(TOPIC, GROUP, 0, LEASE, command.member, command.epoch, float("inf"))
    lane = Lane(KEYS, TOPIC, 0, GROUP, lease)
    lane.in_flight = {stream_id(number) for number in numbers}
    return lane


def _settler(command: Command, *replies: Any) -> Settler:
    return Settler(_context(command.member, *replies), lambda _: None)


def _message(lane: Lane, number: int, attempt: int) -> Message:
    return Message(lane, stream_id(number), [b"data", b"", b"id", b""], attempt)


def _reclaimer(command: Command) -> Reclaimer:
    runner: Any = SimpleNamespace(queue=None)
    return Reclaimer(_context(command.member), runner, _settler(command), page=2)


def _take(command: Command, reader: str, absent: str) -> Wire:
    client: Any = Recorder([b"HELD", absent.encode(), 1]) if absent else Recorder()
    leases = Leases(client, KEYS, SETTINGS, command.member)
    return sent(leases.take(TOPIC, 0, GROUP, reader=reader, absent=[absent] if absent else []))


def _renew(command: Command) -> Wire:
    return RENEW_LEASE.command((LEASE,), (command.member, command.epoch, to_ms(SETTINGS.lease_ttl)))


def _release(command: Command, late_reader: str) -> Wire:
    client: Any = Recorder()
    leases = Leases(client, KEYS, SETTINGS, command.member)
    return sent(leases.release(_lane(command).lease, late_reader))


def _claim(command: Command, cursor: int, reader: str) -> Wire:
    lane = _lane(command)
    lane.recovery.cursor = stream_id(cursor)
    return sent(_reclaimer(command).claim_page(lane, reader, SETTINGS.prefetch))


def _claim_ids(command: Command, cursor: int, reader: str, count: int = SETTINGS.prefetch) -> Wire:
    reclaimer = _reclaimer(command)
    reclaimer._largest = 1  # it knows the sizes of bodies
    return sent(reclaimer._claim_ids(_lane(command), stream_id(cursor), reader, count))


def _read_ahead(command: Command) -> ReadAhead:
    runner: Any = SimpleNamespace(queue=None)
    return ReadAhead(_context(command.member), runner, _settler(command), SimpleNamespace())  # type: ignore[arg-type]


def _called(command: Command, call: int) -> Lane:
    """A lane that makes its call with this number."""
    lane = _lane(command)
    for _ in range(call - 1):
        lane.flows.number()
    return lane


def _put_aside(command: Command, call: int, *numbers: int) -> Wire:
    lane = _called(command, call)
    lane.flows.aside = {stream_id(number): None for number in numbers}
    return sent(_read_ahead(command)._put_aside(lane))


def _read_again(command: Command, call: int, kept: int, *numbers: int) -> Wire:
    """`kept`: the last id that is no first delivery."""
    lane = _called(command, call)
    lane.flows.kept_until = (kept, 0)
    page = IdPage({b"": [stream_id(number) for number in numbers]}, frozenset(), lane.flows.filling)
    return sent(_read_ahead(command)._read_again(lane, page))


def _adopt(command: Command, source: str) -> Wire:
    lane = _lane(command)
    lane.recovery.clock_offset = time.time() - monotonic()  # it knows the server's clock
    return sent(_reclaimer(command).adopt(lane, SETTINGS.prefetch, source=source, leases={}))


def _touch(command: Command, *numbers: int) -> Wire:
    heartbeat: Any = SimpleNamespace(member=command.member, _settings=SETTINGS)
    ids = [stream_id(number) for number in numbers]
    messages = InFlightMessages(STREAM, GROUP, _lane(command).lease, DLQ, lambda: ids, lambda *_: None)
    (made,) = Heartbeat._touches(heartbeat, messages)
    return made


def _remove(command: Command) -> Wire:
    return REMOVE_CONSUMER.command((STREAM,), (GROUP, command.member))


def _read(command: Command, _reader: str) -> Wire:
    return "XREADGROUP", "GROUP", GROUP, command.member, "COUNT", SETTINGS.prefetch // 2, "STREAMS", STREAM, ">"


def _start(command: Command, number: int, attempt: int) -> Wire:
    lane = _lane(command, number)
    return sent(_settler(command).charge(_message(lane, number, attempt), lane))


def _park(command: Command, number: int, attempt: int, is_kept: bool) -> Wire:
    lane = _lane(command, number)
    return sent(_settler(command).park(_message(lane, number, attempt), lane, Park(DAY), "", keep_pending=is_kept))


def _unpark(command: Command) -> Wire:
    return sent(_reclaimer(command).unpark(_lane(command), SETTINGS.prefetch))


def _bury(command: Command, number: int, attempts: int, reason: str, is_again: bool) -> Wire:
    decision, no_notes = Bury(Reason(reason), ""), [None, None]
    return sent(
        _settler(command, no_notes).bury(
            _lane(command, number), stream_id(number), attempts, decision, was_pending=is_again
        )
    )


def _settle(command: Command, *numbers: int) -> Wire:
    lane = _lane(command, *numbers)
    for number, attempts in command.retried:
        lane.note_retry(stream_id(number), attempts)
    _, keys, args = _settler(command)._settling([(lane, [stream_id(number) for number in numbers])])
    return SETTLE_MESSAGES.command(keys, args)


def _settle_outputs(command: Command, is_again: bool, *numbers: int) -> Wire:
    """With one output for each message, which holds its number."""
    producer: Any = SimpleNamespace(keys=KEYS, topic=lambda _: TARGET)
    context, lane = replace(_context(command.member), producer=producer), _lane(command, *numbers)
    outputs: Any = Outputs(context, _unasked, lambda _: None)
    page = []
    for number in numbers:
        entry = MessageOutputs(_message(lane, number, 1))
        entry.outputs.append(Output(TARGET, 0, f"{number}", ("data", f"{number}"), 1, "", is_once=False))
        entry.is_sent = is_again
        page.append((stream_id(number), entry))
    arguments, args = outputs._command(lane, page)
    return SETTLE_OUTPUTS.command(arguments.keys, args)


async def _unasked(*_: Any) -> Any:
    raise AssertionError("only the command is made")


def _hand_back(command: Command, *items: tuple[int, int]) -> Wire:
    lane = _lane(command)
    return sent(_settler(command).hand_back(lane, [_message(lane, *item) for item in items]))
