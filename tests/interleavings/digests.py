"""Every order of the scripts of a digest: an owner with the package's own queue, the next owner, and a real server.

One key. A step of time is an hour, and a window lasts two. A state has the server, what the owner knows, and calls that
come late; ids say the hour and the number of a message. Before a call the server gets the state, with ids by its own
clock. `search.py` walks through all of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import redis

from rsmq.consumer.waiting.flows import Flows, KeyFlow
from rsmq.consumer.waiting.gathering_queue import GatheringQueue
from rsmq.consumer.waiting.ids import Ids
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.open_calls import OpenCalls
from rsmq.heartbeat.lease import Lease
from rsmq.model.keys import Keys
from rsmq.model.message import Message
from rsmq.model.reason import lost_body
from rsmq.redis.scripts import (
    CANCEL_MESSAGE,
    KEEP_WAITS,
    PUT_ASIDE,
    SETTLE_MESSAGES,
    STALE_EPOCH,
    START_CALL,
    Script,
)
from rsmq.testing.server import ThrowawayServer
from tests.interleavings.moves import Move
from tests.interleavings.search import Result, Search

KEYS: Final = Keys()
AT: Final = ("mail", 0, "digests")
STREAM, LEASE, RETRY, DLQ = KEYS.stream(*AT[:2]), KEYS.lease(*AT), KEYS.retry(*AT), KEYS.dlq(*AT)
CANCELS, CANCELLED, WAITS, CALLS = KEYS.cancels(*AT), KEYS.cancelled(*AT), KEYS.waits(*AT), KEYS.calls(*AT)
EVERY: Final = (STREAM, LEASE, RETRY, DLQ, CANCELS, CANCELLED, WAITS, CALLS)
KEY: Final = b"u7"
HOUR: Final = 3_600_000
LINGER: Final = 2
BATCH: Final = 3
MOST_ATTEMPTS: Final = 2
SCRIPTS: Final = {each.name: each for each in (KEEP_WAITS, PUT_ASIDE, START_CALL, SETTLE_MESSAGES, CANCEL_MESSAGE)}


class Server(NamedTuple):
    """`stored`: the hour of each message. `pending` and `waits`: a number with its count, or its due hour; 0 and below
    as they are. `record`: the last message of the latest call; `call`: the number of the owner's last call."""

    epoch: int = 1
    call: int = 0
    stored: tuple[int, ...] = ()
    delivered: int = 0
    pending: tuple[tuple[int, int], ...] = ()
    waits: tuple[tuple[int, float], ...] = ()
    record: int = 0
    marks: tuple[int, ...] = ()
    cancelled: tuple[int, ...] = ()


class Owner(NamedTuple):
    """What the owner knows: its lane, by the numbers of messages. `reading`: delivered, and not received yet. `done`:
    handled, and not known to be settled."""

    epoch: int = 1
    is_taken: bool = False
    ids: tuple[int, ...] = ()
    resting: int = 0
    notes: tuple[tuple[int, str], ...] = ()
    forgotten: tuple[int, ...] = ()
    aside: tuple[int, ...] = ()
    is_dry: bool = False
    open: tuple[Any, ...] = ()
    ended: tuple[Any, ...] = ()
    is_headless: bool = False
    newest: int = 0
    kept: int = 0
    running: tuple[int, ...] = ()
    attempt: int = 0
    done: tuple[int, ...] = ()
    reading: tuple[int, ...] = ()
    calls: int = 0
    looks: bool = False


class Faults(NamedTuple):
    """How often each may still happen."""

    crashes: int = 0
    lost: int = 0
    late: int = 0
    failures: int = 0
    cancels: int = 0


class Call(NamedTuple):
    """A call of an owner, by the numbers of messages."""

    kind: str
    epoch: int
    number: int = 0
    ids: tuple[int, ...] = ()
    notes: tuple[tuple[int, str], ...] = ()
    attempt: int = 0
    end: int = 0
    starts: bool = True
    newest: int = 0
    ended: int = 0


class Truth(NamedTuple):
    """What has really happened. `calls`: the messages of each call whose handler was called."""

    hour: int = 0
    calls: tuple[tuple[int, ...], ...] = ()
    settled: tuple[int, ...] = ()


class DigestWorld(NamedTuple):
    """One state. The search reads these names."""

    server: Server
    members: tuple[Owner, ...]
    late: tuple[Call, ...]
    left: Faults
    truth: Truth


def abstract_id(stored: tuple[int, ...], number: int) -> bytes:
    """The id of a message as the owner has it."""
    return b"%d-%d" % (stored[number - 1] * HOUR, number) if number else b"0-0"


def number_of(entry_id: bytes) -> int:
    """Which message has an id."""
    return int(entry_id.rpartition(b"-")[2])


class DigestStore:
    """The keys on a real server. The same call in the same state is executed once."""

    def __init__(self, client: redis.Redis, scripts: dict[str, Script]) -> None:
        self._client, self._scripts = client, {**SCRIPTS, **scripts}
        self._known: dict[Any, tuple[Server, Any]] = {}

    def execute(self, server: Server, hour: int, call: Call) -> tuple[Server, Any]:
        """The state after a call, and its reply."""
        asked = server, hour, call
        if asked not in self._known:
            second, micro = self._client.time()
            zero = int(second) * 1000 + int(micro) // 1000 - 500 - hour * HOUR  # the time of hour 0
            self._write(server, zero)
            reply = self._send(server, zero, call)
            self._known[asked] = self._read(server, zero), reply
        return self._known[asked]

    def _id(self, server: Server, zero: int, number: int) -> str:
        return f"{zero + server.stored[number - 1] * HOUR}-{number}" if number else "0-0"

    def _write(self, server: Server, zero: int) -> None:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.delete(*EVERY)
        ids = [self._id(server, zero, number) for number in range(len(server.stored) + 1)]
        pipeline.execute_command("XGROUP", "CREATE", STREAM, AT[2], "0", "MKSTREAM")
        for entry_id in ids[1:]:
            pipeline.execute_command("XADD", STREAM, entry_id, "data", "x", "key", KEY)
        pipeline.execute_command("XGROUP", "SETID", STREAM, AT[2], ids[server.delivered])
        for number, count in server.pending:
            pipeline.execute_command(
                "XCLAIM", STREAM, AT[2], f"m{server.epoch}", 0, ids[number], "RETRYCOUNT", count, "FORCE", "JUSTID"
            )
        for number, due in server.waits:
            pipeline.execute_command("ZADD", WAITS, due if due <= 1 else zero + due * HOUR, ids[number])
        if server.record:
            pipeline.execute_command("HSET", CALLS, KEY, ids[server.record])
        for number in server.marks:
            pipeline.execute_command("HSET", CANCELS, ids[number], "cancelled")
        for number in server.cancelled:
            pipeline.execute_command("ZADD", CANCELLED, number, ids[number])
        call = f"{server.epoch}|{server.call}" if server.call else ""
        pipeline.execute_command("HSET", LEASE, "owner", f"m{server.epoch}", "epoch", server.epoch, "call", call)
        pipeline.execute()

    def _send(self, server: Server, zero: int, call: Call) -> Any:
        def real(number: int) -> str:
            return self._id(server, zero, number)

        me, ids = (f"m{call.epoch}", call.epoch), [real(number) for number in call.ids]
        about = (0, 1000, *lost_body(AT[2], "m"))
        script = self._scripts[call.kind]
        if call.kind == "keep_waits":
            notes = [part for number, due in call.notes for part in (real(number), due)]
            args: tuple[Any, ...] = (*me, 10, len(ids), *ids, *notes)
            command = script.full_command((LEASE, WAITS), args)
        elif call.kind == "put_aside":
            command = script.full_command((STREAM, LEASE, DLQ), (*me, AT[2], call.number, *about, *ids))
        elif call.kind == "start_call":
            ended = (1, KEY, real(call.ended)) if call.ended else (0,)
            end = zero + call.end if call.end else 0
            more = (call.attempt, KEY, end, int(call.starts), real(call.newest), *ended)
            names = (STREAM, LEASE, RETRY, DLQ, CANCELS, CANCELLED, CALLS)
            command = script.full_command(names, (*me, AT[2], call.number, 0, *about, *more, *ids))
        elif call.kind == "settle_messages":
            args = (me[0], AT[2], me[1], len(ids), 0, *ids)
            command = script.full_command((STREAM, LEASE, RETRY), args)
        else:
            names = (STREAM, RETRY, CANCELS, CANCELLED, WAITS)
            command = script.full_command(names, (AT[2], ids[0], "asked", 5))
        return _numbers(self._client.execute_command(*command))

    def _read(self, server: Server, zero: int) -> Server:
        ask = self._client.execute_command
        (group,) = ask("XINFO", "GROUPS", STREAM)
        last = dict(zip(group[::2], group[1::2], strict=True))[b"last-delivered-id"]
        rows = ask("XPENDING", STREAM, AT[2], "-", "+", 100)
        pending = [(number_of(entry_id), count) for entry_id, _, _, count in rows]
        waits = [
            (number_of(each), due if due <= 1 else round((due - zero) / HOUR, 1))
            for each, due in _pairs(ask("ZRANGE", WAITS, 0, -1, "WITHSCORES"))
        ]
        record, call = self._client.hget(CALLS, KEY), self._client.hget(LEASE, "call") or b""
        return server._replace(
            call=int(call.rpartition(b"|")[2] or 0) if call.startswith(b"%d|" % server.epoch) else 0,
            delivered=number_of(last),
            pending=tuple(sorted(pending)),
            waits=tuple(sorted(waits)),
            record=number_of(record) if record else 0,
            marks=tuple(sorted(map(number_of, self._client.hkeys(CANCELS)))),
            cancelled=tuple(sorted(map(number_of, self._client.zrange(CANCELLED, 0, -1)))),
        )


def _pairs(flat: list[Any]) -> list[tuple[bytes, float]]:
    """Members of a sorted set with their scores."""
    return [(each, float(score)) for each, score in zip(flat[::2], flat[1::2], strict=True)]


def _numbers(reply: Any) -> Any:
    """A reply that can be compared: lists as tuples."""
    return tuple(map(_numbers, reply)) if isinstance(reply, list) else reply


# -- the owner, with the package's queue ------------------------------------------------------------------------------


def lane_of(owner: Owner, stored: tuple[int, ...]) -> tuple[GatheringQueue, Lane]:
    """The package's objects in the state of an owner."""
    queue = GatheringQueue(batch=BATCH, linger=timedelta(hours=LINGER), prefetch=100)
    queue.read_ahead(100, 100, 1, lambda: None)
    lease = Lease("mail", "digests", 0, LEASE, f"m{owner.epoch}", str(owner.epoch), float("inf"))
    lane = Lane(KEYS, *AT, lease)
    lane.recovery.cursor = None
    flows = lane.flows

    def entry(number: int) -> bytes:
        return abstract_id(stored, number)

    if owner.is_taken:
        flow = flows.waiting[KEY] = KeyFlow()
        if owner.ids:
            flow.ids = Ids()
            for number in owner.ids:
                flow.ids.append(entry(number))
    if owner.resting:
        flows.resting.add(KEY, entry(owner.resting), is_retry=False)
    flows.resting.notes = {entry(number): due for number, due in owner.notes}
    flows.resting.forgotten = {entry(number): None for number in owner.forgotten}
    flows.aside = {entry(number): None for number in owner.aside}
    flows.far = len(owner.ids) + bool(owner.resting)
    flows.kept_until = (stored[owner.kept - 1] * HOUR, owner.kept) if owner.kept else (0, 0)
    if owner.is_dry:
        flows.make_due(KEY)
    calls = flows.calls
    calls.newest = entry(owner.newest)
    if owner.open:
        last, attempts, ids = owner.open
        calls.begin(KEY, [*map(entry, ids)] or [entry(last)], attempts)
        opened: Any = calls.of(KEY)
        opened.last = (stored[last - 1] * HOUR, last)
    if owner.ended:
        calls._ended[KEY] = entry(owner.ended[0]), [*map(entry, owner.ended[1])]
    if owner.is_headless:
        calls.headless.add(KEY)
    lane.in_flight = {entry(number) for number in (*owner.running, *owner.done)}
    queue.in_flight = len(owner.running)
    return queue, lane


def owner_of(owner: Owner, lane: Lane) -> Owner:
    """The state of an owner whose lane was changed."""
    flows = lane.flows
    flow, opened = flows.waiting.get(KEY), flows.calls.of(KEY)
    ended = flows.calls._ended.get(KEY)
    return owner._replace(
        is_taken=flow is not None,
        ids=tuple(map(number_of, flow.ids)) if flow is not None and flow.ids else (),
        resting=number_of(flows.resting.first_of(KEY) or b"-0"),
        notes=tuple((number_of(each), due) for each, due in flows.resting.notes.items()),
        forgotten=tuple(map(number_of, flows.resting.forgotten)),
        aside=tuple(map(number_of, flows.aside)),
        is_dry=KEY in flows.dry,
        open=(opened.last[1], opened.attempts, tuple(map(number_of, opened.ids))) if opened else (),
        ended=(number_of(ended[0]), tuple(map(number_of, ended[1]))) if ended else (),
        is_headless=KEY in flows.calls.headless,
        newest=number_of(flows.calls.newest),
        kept=flows.kept_until[1],
    )


def message_of(lane: Lane, stored: tuple[int, ...], number: int, attempt: int, *, is_again: bool) -> Message:
    """A message as the owner gets it."""
    message = Message(lane, abstract_id(stored, number), [b"data", b"x", b"key", KEY], attempt)
    message.is_redelivered = is_again
    return message


def numbered(world: DigestWorld) -> DigestWorld:
    """The world with the numbers of calls counted anew in their order: only that matters."""
    (owner,), server = world.members, world.server
    found = sorted({owner.calls, server.call, *(call.number for call in world.late)} - {0})
    new = {0: 0} | {number: place for place, number in enumerate(found, 1)}
    late = tuple(sorted(call._replace(number=new[call.number]) for call in world.late))
    members = (owner._replace(calls=new[owner.calls]),)
    return world._replace(server=server._replace(call=new[server.call]), members=members, late=late)


class DigestMoves:
    """What can happen. Messages are published until `hours`."""

    def __init__(self, store: DigestStore, messages: int, hours: int, faults: Faults) -> None:
        self._store, self._messages, self._hours, self._faults = store, messages, hours, faults

    def begin(self) -> DigestWorld:
        """Nothing has happened."""
        return DigestWorld(Server(), (Owner(),), (), self._faults, Truth())

    def is_done(self, world: DigestWorld) -> bool:
        """Whether everything is published and settled, as far as there was time."""
        server = world.server
        is_published = len(server.stored) == self._messages or world.truth.hour + LINGER > self._hours
        return is_published and len(server.stored) == server.delivered and not server.pending

    def after(self, world: DigestWorld) -> list[Move]:
        """All that can happen next."""
        return [
            Move(text, numbered(after), is_fault, broken or self._miscounted(after))
            for text, after, is_fault, broken in self._each(world)
        ]  # type: ignore[arg-type]

    def _miscounted(self, world: DigestWorld) -> str:
        """What waits as an id has provably not started, unless a reply is lost or a call is late."""
        (owner,), counts = world.members, dict(world.server.pending)
        if world.left.lost < self._faults.lost or world.left.late < self._faults.late or owner.kept:
            return ""
        last = owner.open[0] if owner.open else 0
        waiting = {owner.resting, *owner.ids} - {0, *owner.aside}
        wrong = sorted(number for number in waiting if number > last and counts.get(number, 0))
        return f"{wrong} wait, and the server counts them as started" if wrong else ""

    def _each(self, world: DigestWorld) -> Iterator[tuple[str, DigestWorld, bool, str]]:
        server, (owner,), left, truth = world.server, world.members, world.left, world.truth
        if len(server.stored) < self._messages and truth.hour + LINGER <= self._hours:
            stored = (*server.stored, truth.hour)
            yield "a message is published", world._replace(server=server._replace(stored=stored)), False, ""
        if truth.hour < self._hours:
            yield "an hour passes", world._replace(truth=truth._replace(hour=truth.hour + 1)), False, ""
        yield from self._reads(world, owner)
        yield from self._runs(world, owner)
        for call in self._calls(world, owner):
            yield from self._answered(world, owner, call)
        if left.crashes:
            yield self._taken_over(world, owner)
        for number, _ in server.pending if left.cancels else ():
            if number not in (*server.marks, *server.cancelled):
                after, reply = self._store.execute(server, truth.hour, Call("cancel_message", 0, ids=(number,)))
                cut = world._replace(server=after, left=left._replace(cancels=left.cancels - 1))
                looking = cut._replace(members=(owner._replace(looks=True),))
                yield f"{number} is cancelled: {reply[0].decode()}", looking, True, ""
        for place, call in enumerate(world.late):
            after, reply = self._store.execute(server, truth.hour, call)
            rest = world.late[:place] + world.late[place + 1 :]
            is_stale = call.epoch == server.epoch or reply[0] == STALE_EPOCH or reply[0] == (STALE_EPOCH,)
            broken = "" if is_stale else f"{call.kind} of a former owner was accepted"
            yield f"late: {call}", world._replace(server=after, late=rest), True, broken

    def _reads(self, world: DigestWorld, owner: Owner) -> Iterator[tuple[str, DigestWorld, bool, str]]:
        server, stored = world.server, world.server.stored
        if server.delivered < len(stored) and not owner.reading:
            number = server.delivered + 1
            after = server._replace(delivered=number, pending=tuple(sorted({*server.pending, (number, 1)})))
            reading = owner._replace(reading=(number,))
            yield f"{number} is delivered", world._replace(server=after, members=(reading,)), False, ""
        if owner.reading:
            queue, lane = lane_of(owner, stored)
            (number,) = owner.reading
            lane.in_flight.add(abstract_id(stored, number))
            queue.offer(lane, [message_of(lane, stored, number, 1, is_again=False)])
            received = owner_of(owner, lane)._replace(reading=())
            yield f"{number} is received", world._replace(members=(received,)), False, ""

    def _runs(self, world: DigestWorld, owner: Owner) -> Iterator[tuple[str, DigestWorld, bool, str]]:
        stored = world.server.stored
        if not owner.running:
            return
        queue, lane = lane_of(owner, stored)
        queue.in_flight = 0
        queue.release(lane, KEY)
        ended = owner_of(owner, lane)._replace(running=(), done=(*owner.done, *owner.running))
        yield f"{owner.running} are handled", world._replace(members=(ended,)), False, ""
        if world.left.failures and owner.attempt < MOST_ATTEMPTS:
            queue, lane = lane_of(owner, stored)
            first, *later = [
                message_of(lane, stored, number, owner.attempt, is_again=True) for number in owner.running
            ]  # fmt: skip
            queue.put_back(lane, later)
            parked = queue.park(first, lane)
            following = parked.again()
            following.attempt += 1
            queue.resume(parked, lane, following)
            failed = owner_of(owner, lane)._replace(running=())
            left = world.left._replace(failures=world.left.failures - 1)
            yield f"{owner.running} fail", world._replace(members=(failed,), left=left), True, ""

    def _calls(self, world: DigestWorld, owner: Owner) -> Iterator[Call]:
        """What the owner may send next."""
        stored, number = world.server.stored, owner.calls + 1
        has_due = any(due <= world.truth.hour for _, due in world.server.waits)
        if owner.notes or owner.forgotten or has_due:
            yield Call("keep_waits", owner.epoch, ids=owner.forgotten, notes=owner.notes)
        if owner.aside:
            yield Call("put_aside", owner.epoch, number, owner.aside)
        if owner.done:
            yield Call("settle_messages", owner.epoch, ids=owner.done)
        queue, lane = lane_of(owner, stored)
        plan = None if owner.running else queue.next_call(lane, [lane])
        if plan is not None:
            records = lane.flows.calls.to_forget(lane.in_flight)
            yield Call(
                "start_call", owner.epoch, number, tuple(map(number_of, plan.ids)), (), plan.attempts + 1,
                plan.window_end, plan.starts, owner.newest, number_of(records.get(KEY, b"-0")),
            )  # fmt: skip

    def _answered(self, world: DigestWorld, owner: Owner, call: Call) -> Iterator[tuple[str, DigestWorld, bool, str]]:
        left, sent = world.left, owner._replace(calls=max(owner.calls, call.number))
        after, reply = self._store.execute(world.server, world.truth.hour, call)
        executed = world._replace(server=after)
        if call.kind == "settle_messages":
            truth = world.truth._replace(settled=tuple(sorted({*world.truth.settled, *call.ids})))
            executed = executed._replace(truth=truth)
        done, broken = self._told(executed, sent, call, reply)
        yield f"{call.kind}{call.ids} → {reply}", done, False, broken
        if left.lost:
            lost = executed._replace(members=(sent,), left=left._replace(lost=left.lost - 1))
            yield f"the reply to {call.kind}{call.ids} is lost", lost, True, ""
        if left.late and call.number:
            late = world._replace(
                members=(sent,), late=(*world.late, call), left=left._replace(late=left.late - 1)
            )  # fmt: skip
            yield f"{call.kind}{call.ids} will be late", late, True, ""

    def _told(self, world: DigestWorld, owner: Owner, call: Call, reply: Any) -> tuple[DigestWorld, str]:
        """What the owner makes of a reply."""
        stored = world.server.stored
        queue, lane = lane_of(owner, stored)
        flows = lane.flows
        if call.kind == "keep_waits":
            told = [abstract_id(stored, number) for number in call.ids]
            flows.resting.told(told, [(abstract_id(stored, number), due) for number, due in call.notes])
            for entry_id, why in reply[2:]:
                entry = abstract_id(stored, number_of(entry_id))
                queue.wake(lane, entry, is_rescheduled=why == 1, is_cancelled=why == 2)
                flows.resting.forget(entry)
            return world._replace(members=(owner_of(owner, lane),)), ""
        if call.kind == "put_aside":
            if reply[0] == b"OK":
                flows.is_aside([abstract_id(stored, number) for number in call.ids])
            return world._replace(members=(owner_of(owner, lane),)), ""
        if call.kind == "settle_messages":
            return world._replace(members=(owner._replace(done=()),)), ""
        if reply[0] != b"OK":
            return world._replace(members=(owner,)), ""
        plan: Any = queue.next_call(lane, [lane])
        flows.calls.forgotten({KEY: abstract_id(stored, call.ended)} if call.ended else {})
        rows = {number_of(row[0]): row[1] for row in reply[1:]}
        found = [number for number in call.ids if number in rows]
        started = [number for number in found if isinstance(rows[number], tuple)]
        messages = [message_of(lane, stored, number, call.attempt, is_again=call.attempt > 1) for number in started]
        queue.begin_call(lane, plan, [abstract_id(stored, number) for number in found], messages)
        if started:
            queue.take_behind(lane, KEY, BATCH)
        changed = owner_of(owner, lane)._replace(running=tuple(started), attempt=call.attempt)
        world = world._replace(members=(changed,))
        if not started:
            return world, ""
        broken = self._wrong(world, tuple(started), call.attempt, found)
        truth = world.truth._replace(calls=(*world.truth.calls, tuple(started)))
        return world._replace(truth=truth), broken

    def _wrong(self, world: DigestWorld, started: tuple[int, ...], attempt: int, found: list[int]) -> str:
        """What a call breaks that begins with these. `found`: with those that have left it in the same step."""
        truth, stored = world.truth, world.server.stored
        ended = {*truth.settled, *world.server.cancelled}
        if twice := {*started} & {*truth.settled}:
            return f"{twice} are handled after they were settled"
        if before := [n for n in range(1, started[0]) if n not in ended]:
            return f"{started} overtake {before}"
        earlier = [each for each in truth.calls if {*each} & {*started}]
        if earlier:
            if attempt <= len(earlier):
                return f"{started} begin attempt {attempt}, after {len(earlier)} starts"
            if {*started} != {*earlier[-1]} - ended:
                return f"{started} after {earlier[-1]}: other messages"
            return ""
        end = stored[found[0] - 1] + LINGER
        if len(found) < BATCH and truth.hour < end:
            return f"{started} begin before their window is over"
        missing = [n for n, at in enumerate(stored, 1) if at < end and n not in (*found, *ended)]
        return f"{started} begin without {missing}" if missing and len(found) < BATCH else ""

    def _taken_over(self, world: DigestWorld, owner: Owner) -> tuple[str, DigestWorld, bool, str]:
        """The owner dies; the next one finds all in the server. A read of the dead one is cut off before."""
        server, left = world.server, world.left
        queue, lane = lane_of(Owner(owner.epoch + 1), server.stored)
        calls, stored = lane.flows.calls, server.stored
        lane.recovery.restart()
        calls.load(lane.recovery.number, {KEY: abstract_id(stored, server.record)} if server.record else {})
        queue.load_times(lane, lane.recovery.number, {abstract_id(stored, n): due for n, due in server.waits})
        for number, count in server.pending:
            entry = abstract_id(stored, number)
            counted = calls.attempts_of(KEY, entry, count)
            if counted is None and count:
                lane.flows.put_aside(entry)
            lane.in_flight.add(entry)
            queue.offer(lane, [message_of(lane, stored, number, (counted or 0) + 1, is_again=True)])
        lane.recovery.cursor = None
        queue.recovered(lane)
        fresh = owner_of(Owner(owner.epoch + 1), lane)
        after = world._replace(
            server=server._replace(epoch=owner.epoch + 1, call=0), members=(fresh,),
            left=left._replace(crashes=left.crashes - 1),
        )  # fmt: skip
        return "the owner dies, and the next one takes over", after, True, ""


@dataclass(frozen=True)
class DigestScenario:
    """So many messages within so many hours, and the faults that may happen. `is_short`: in `make test`."""

    messages: int
    hours: int
    faults: Faults
    is_short: bool = False

    @property
    def name(self) -> str:
        """For people."""
        faults = ", ".join(f"{number} {kind}" for kind, number in self.faults._asdict().items() if number)
        return f"digests: {self.messages} messages in {self.hours} hours, {faults or 'no faults'}"

    def search(self, scripts: dict[str, Script] | None = None) -> Result:
        """What the search finds with some scripts, on a server of its own."""
        with ThrowawayServer(tcp=True) as server, redis.Redis.from_url(server.url, protocol=2) as client:
            client.response_callbacks.clear()
            store = DigestStore(client, scripts or {})
            moves: Any = DigestMoves(store, self.messages, self.hours, self.faults)
            return Search(moves).run()


CRASH: Final = DigestScenario(2, 3, Faults(crashes=1), is_short=True)
LOST: Final = DigestScenario(2, 3, Faults(lost=1))
LATE: Final = DigestScenario(2, 3, Faults(late=1))
LATE_CRASH: Final = DigestScenario(2, 3, Faults(crashes=1, late=1))
FAILURE: Final = DigestScenario(2, 3, Faults(failures=1))
CANCEL: Final = DigestScenario(2, 3, Faults(cancels=1))
LONG: Final = DigestScenario(2, 4, Faults(crashes=1))
LATER: Final = DigestScenario(2, 4, Faults(failures=1), is_short=True)
NO_FAULTS: Final = DigestScenario(2, 3, Faults())
DIGEST_SCENARIOS: Final = (
    CRASH,
    LOST,
    LATE,
    FAILURE,
    CANCEL,
    LATE_CRASH,
    LONG,
    LATER,
    DigestScenario(2, 4, Faults(crashes=1, failures=1)),
    DigestScenario(2, 3, Faults(crashes=1, lost=1)),
    DigestScenario(2, 3, Faults(crashes=1, cancels=1)),
    DigestScenario(3, 3, Faults(crashes=1)),
)


@dataclass(frozen=True)
class DigestWeakening:
    """A script with some of its text replaced, or a method of the queue with another answer, and a scenario that shows
    what it was good for."""

    what: str
    scenario: DigestScenario
    script: str = ""
    old: str = ""
    new: str = ""
    method: tuple[Any, str, Callable[..., Any]] | None = field(default=None, compare=False)

    @property
    def is_short(self) -> bool:
        """Whether `make test` plays it: `python -m tests.interleavings --weakened` plays all."""
        return self.scenario in (NO_FAULTS, CRASH, LOST, CANCEL)

    def search(self) -> Result:
        """What the search finds with it."""
        with ExitStack() as stack:
            if self.method is not None:
                stack.enter_context(patch.object(*self.method))
            return self.scenario.search({self.script: self._weak()} if self.script else {})

    def _weak(self) -> Script:
        script = SCRIPTS[self.script]
        if script.source.count(self.old) != 1:
            raise ValueError(f"{self.script} has this text {script.source.count(self.old)} times: {self.old}")
        weak = copy.copy(script)
        weak.source = script.source.replace(self.old, self.new)
        return weak


FENCE: Final = "if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then"
COUNTED: Final = "count_call(KEYS[2], ARGV[2], ARGV[4])"
IN_ORDER: Final = "if not count_call(KEYS[2], ARGV[2], ARGV[4]) then return { 'LATE' } end"


def _ids_as_they_are(flows: Flows, key: bytes, most: int) -> list[bytes]:
    """Also those of which the server does not know that they have not started."""
    ids = flows.waiting[key].ids
    return ids.first(most) if ids else []


DIGEST_WEAKENINGS: Final = (
    DigestWeakening("start_call checks neither owner nor epoch", LATE_CRASH, "start_call", FENCE, "if false then"),
    DigestWeakening("put_aside checks neither owner nor epoch", LATE_CRASH, "put_aside", FENCE, "if false then"),
    DigestWeakening("put_aside is executed after a later call", LATE_CRASH, "put_aside", IN_ORDER, COUNTED),
    DigestWeakening(
        "start_call records nothing", CRASH, "start_call",
        "if newest then redis.call('HSET', KEYS[7], ARGV[21], newest) end", "",
    ),
    DigestWeakening(
        "start_call does not charge the attempt", CRASH, "start_call", "'RETRYCOUNT', ARGV[20]", "'RETRYCOUNT', 0"
    ),
    DigestWeakening(
        "start_call does not look for what is unread", NO_FAULTS, "start_call", "#unread + #on_way", "#on_way"
    ),
    DigestWeakening(
        "start_call does not look for what is on its way", NO_FAULTS, "start_call", "#unread + #on_way", "#unread"
    ),
    DigestWeakening(
        "start_call starts the others with a cancelled first message", CANCEL, "start_call",
        "elseif ARGV[23] == '0' then", "elseif false then",
    ),
    DigestWeakening(
        "keep_waits names only once", LOST, "keep_waits",
        "redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now,", "redis.call('ZRANGEBYSCORE', KEYS[2], '(0', now,",
    ),
    DigestWeakening(
        "keep_waits lets a window end at once", NO_FAULTS, "keep_waits",
        "math.min(tonumber(ARGV[i]:match('^%d+')), now) + due)", "now)",
    ),
    DigestWeakening("put_aside leaves counts", NO_FAULTS, "put_aside", "'RETRYCOUNT', 0", "'RETRYCOUNT', 1"),
    DigestWeakening(
        "the next owner does not know which have started", CRASH,
        method=(OpenCalls, "attempts_of", lambda *_: None),
    ),
    DigestWeakening(
        "the next owner believes the counts", CRASH,
        method=(OpenCalls, "attempts_of", lambda _calls, _key, _id, attempts: attempts or None),
    ),
    DigestWeakening(
        "a call begins before the one before it is settled", LONG,
        method=(OpenCalls, "awaits_settlement", lambda *_: False),
    ),
    DigestWeakening(
        "a retry takes what came meanwhile", LATER, method=(Flows, "ids_of_call", _ids_as_they_are),
    ),
    DigestWeakening(
        "a window is over when its first message is read", NO_FAULTS,
        method=(GatheringQueue, "_end_full_window", lambda queue, lane, key: (
            lane.flows.resting.first_of(key) and lane.flows.wake(lane.flows.resting.first_of(key), is_rescheduled=False)
        )),
    ),
)  # fmt: skip
