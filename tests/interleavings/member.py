"""What a member does with what it knows: the worker of the package as a pure function.

A member does at once what it can do without a reply (`pump`), as an event loop does. What comes back from the server
is one step (`answered`), and so is what never comes back (`unanswered`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from rsmq.handler.retry import Bury, Park, decide, decide_redelivery
from rsmq.redis.scripts import NOT_PENDING, OK, STALE_EPOCH
from tests.interleavings import flows
from tests.interleavings.commands import number_of
from tests.interleavings.rules import Rules
from tests.interleavings.world import (
    AWAY,
    BURYING,
    DONE,
    GATHERED,
    HANDLED,
    PARKED,
    PARKING,
    READY,
    RUNNING,
    SETTLING,
    STARTING,
    Command,
    Item,
    Lane,
    Member,
)

ASKING: Final = (STARTING, PARKING, BURYING)
"""Phases in which a script for one message is on its way."""


def pump(member: Member, rules: Rules) -> tuple[Member, list[int]]:
    """Everything that needs no reply. Returns the messages whose handlers start, too."""
    started: list[int] = []
    before = None
    while before is not member and member.is_alive and member.lane is not None:
        before = member
        member = _fetch(member, rules)
        member = _run(member, rules, started)
        member = _ask_ahead(member, rules)
        member = _settle(member, rules)
        member = _leave(member, rules)
    return member, started


def _send(
    member: Member,
    kind: str,
    role: str,
    *args: Any,
    lane: Lane,
    known: Iterable[int] = (),
    retried: Iterable[tuple[int, int]] = (),
) -> Member:
    command = Command(kind, role, member.name, lane.grant, lane.epoch, args, frozenset(known), tuple(retried))
    return member._replace(lane=lane, on_way=(*member.on_way, command))


def _fetch(member: Member, rules: Rules) -> Member:
    lane = member.lane
    if lane is None or not lane.is_held or lane.leaving or not member.is_free("fetch"):
        return member
    if any(item.number in lane.undelivered for item in lane.items):
        return member  # it waits until these are handled
    if lane.cursor is None:
        return _send(member, "read", "fetch", member.reader, lane=lane)
    known = [item.number for item in lane.items]
    kind = "claim" if rules.room is None else "claim_ids"
    return _send(member, kind, "fetch", lane.cursor, member.reader, lane=lane, known=known)


def _ask_ahead(member: Member, rules: Rules) -> Member:
    """What waits as ids is put aside, and read again."""
    lane = member.lane
    if rules.room is None or lane is None or not lane.is_held or lane.leaving or not member.is_free("ahead"):
        return member
    call = flows.next_call(lane, rules)
    return member if call is None else _send(member, call[0], "ahead", *call[1], lane=call[2])


def _run(member: Member, rules: Rules, started: list[int]) -> Member:
    lane = member.lane
    if lane is None or not lane.is_held:
        return member
    asking = {item.number for item in lane.items if item.phase in ASKING}
    if lane.deferred and asking.isdisjoint(entry[0] for entry in lane.deferred):
        entries, lane = lane.deferred, lane._replace(deferred=())
        member = member._replace(lane=(lane := _enqueued(lane, entries, rules, is_retry=True)))
    for item in lane.items:
        role = f"work {item.number}"
        if item.phase in ASKING and member.is_free(role):
            return _send(member, *_asked(item, role, rules), lane=lane)
    if rules.batch:
        return member if (changed := _batch(lane, rules, started)) is lane else member._replace(lane=changed)
    for item in lane.items:
        if item.phase == READY and _may_start(lane, item, rules):
            lane = _with(lane, item._replace(phase=STARTING if item.is_again else RUNNING))
            if not item.is_again:
                started.append(item.number)
            return member._replace(lane=lane)
    return member


def _batch(lane: Lane, rules: Rules, started: list[int]) -> Lane:
    """What the one call of a batch handler can do next: gather, start, or leave what it has handled to be settled."""
    phases = {item.phase for item in lane.items}
    if not phases.isdisjoint(ASKING):
        return lane
    if HANDLED in phases:
        return _turned(lane, HANDLED, DONE)
    if GATHERED in phases:
        started += [item.number for item in lane.items if item.phase == GATHERED]
        return _turned(lane, GATHERED, RUNNING)
    if RUNNING in phases:
        return lane
    picked: list[Item] = []
    for index, item in enumerate(lane.items):
        ahead = [each for each in lane.items[:index] if each not in picked]
        if item.phase == READY and len(picked) < rules.batch and not _is_blocked(item.number, ahead, rules):
            picked.append(item)
    for item in picked:
        lane = _with(lane, item._replace(phase=STARTING if item.is_again else GATHERED))
    return lane


def _turned(lane: Lane, phase: str, into: str) -> Lane:
    """All items of one phase are in another one."""
    return lane._replace(items=tuple(each._replace(phase=into) if each.phase == phase else each for each in lane.items))


def _asked(item: Item, role: str, rules: Rules) -> tuple[Any, ...]:
    match item.phase:
        case "starting":
            return "start", role, item.number, item.attempt
        case "parking":
            return "park", role, item.number, item.attempt, rules.blocks(item.number)
    return "bury", role, item.number, item.attempt, item.reason, item.is_unsure


def _may_start(lane: Lane, item: Item, rules: Rules) -> bool:
    busy = sum(each.phase in (RUNNING, *ASKING) for each in lane.items)
    ahead = lane.items[: lane.items.index(item)]
    return busy < rules.concurrency and not _is_blocked(item.number, ahead, rules)


def _is_blocked(number: int, ahead: Iterable[Item], rules: Rules) -> bool:
    key = rules.keys[number - 1]
    waits_for = [
        each for each in ahead if rules.keys[each.number - 1] == key and each.phase not in (DONE, SETTLING, AWAY)
    ]
    return rules.blocks(number) and bool(waits_for)


def _settle(member: Member, rules: Rules) -> Member:
    lane = member.lane
    if lane is None or not member.is_free("settle"):
        return member
    done = [item for item in lane.items if item.phase == DONE]
    if not done or (rules.has_outputs and not lane.is_held):
        return member
    is_again = any(item.is_unsure for item in done)
    if is_again:  # first the same call again
        done = [item for item in done if item.is_unsure]
    for item in done:
        lane = _with(lane, item._replace(phase=SETTLING))
    if rules.has_outputs:
        return _send(member, "settle_outputs", "settle", is_again, *(item.number for item in done), lane=lane)
    retried = [] if rules.is_shared else [(item.number, item.attempt - 1) for item in done if item.is_again]
    retried = [each for each in retried if each[1]]
    return _send(member, "settle", "settle", *(item.number for item in done), lane=lane, retried=retried)


def _leave(member: Member, rules: Rules) -> Member:
    lane = member.lane
    if lane is None or not lane.leaving:
        return member
    if lane.leaving == 1 and all(command.role != "fetch" for command in member.on_way):
        unstarted = [(item.number, item.attempt) for item in lane.items if item.phase == READY]
        if lane.calls > lane.answered and "the end of calls without an answer" not in rules.without:
            ending = lane._replace(calls=lane.calls + 1)
            return _send(member, "put_aside", "lease", ending.calls, lane=ending) if member.is_free("lease") else member
        lane, unsure = flows.given_back(lane, rules)
        unstarted += unsure
        rest = tuple(item for item in lane.items if item.phase not in (READY, PARKED))
        lane = lane._replace(items=rest, leaving=2 if unstarted else 3)
        if unstarted:
            return _send(member, "hand_back", "lease", *unstarted, lane=lane)
        return member._replace(lane=lane)
    if lane.leaving == 3 and not any(item.phase in (RUNNING, GATHERED, HANDLED, *ASKING) for item in lane.items):
        lane = lane._replace(items=tuple(item for item in lane.items if item.phase in (DONE, SETTLING)))
        if lane.items:
            return member if lane == member.lane else member._replace(lane=lane)
        released = _send(member, "release", "lease", member.reader if member.is_read_late else "", lane=lane)
        return released._replace(lane=None)
    return member


# -- what comes back ----------------------------------------------------------------------------------------------


def answered(member: Member, command: Command, reply: Any, rules: Rules) -> tuple[Member, list[int]]:
    """A reply. Returns the messages whose handlers start by it, too. A lane that is gone ignores it."""
    member = _off_way(member, command)
    lane = member.lane
    if lane is None or lane.grant != command.grant:
        return member, []
    word = reply[0] if isinstance(reply, list) and reply else reply
    if command.kind == "settle":
        word = reply[0][0]
    if word == STALE_EPOCH:
        if command.kind in ("claim", "claim_ids", "put_aside", "read_again", "unpark"):
            return member._replace(lane=lane._replace(is_held=False)), []
        return member._replace(lane=lane._replace(leaving=3) if command.kind == "hand_back" else None), []
    return _accepted(member, lane, command, word, reply, rules)


def _accepted(
    member: Member, lane: Lane, command: Command, word: Any, reply: Any, rules: Rules
) -> tuple[Member, list[int]]:
    started: list[int] = []
    match command.kind:
        case "claim":
            entries = [(number_of(each[0]), each[1], each[2] > 0, bool(each[4])) for each in reply[3:]]
            if not lane.is_restarted:
                lane = lane._replace(cursor=number_of(reply[1]) or None)
            lane = _enqueued(
                lane._replace(is_restarted=False), [e for e in entries if e[0] not in command.known], rules
            )
            if lane.cursor is None and lane.newest is None:
                lane = lane._replace(newest=0)
        case "claim_ids":
            lane = _claimed(lane, command, reply, rules)
        case "put_aside" | "read_again" if word != OK:
            lane = lane._replace(answered=max(lane.answered, command.args[0]))
        case "put_aside":
            lane = lane._replace(answered=max(lane.answered, command.args[0]))
            lane = flows.put_aside(lane, reply, command.args[1:])
        case "read_again":
            lane = lane._replace(answered=max(lane.answered, command.args[0]))
            lane = flows.read_again(lane, reply, rules)
        case "adopt":
            entries = [(number_of(each[0]), each[1], each[2] > 0, bool(each[4])) for each in reply[3:]]
            lane = _enqueued(lane, [each for each in entries if each[0] not in command.known], rules)
        case "touch":
            taken = {number_of(each) for each in reply[0]}
            undecided = [item.number for item in lane.items if item.phase not in (*ASKING, DONE, SETTLING)]
            lane = _without(lane, *taken.intersection(undecided))
        case "read":
            numbers = [number_of(entry[0]) for _, entries in reply or () for entry in entries]
            if rules.room is None:
                lane = lane._replace(items=(*lane.items, *(Item(number, 1) for number in numbers)))
            elif any(item.number in numbers for item in lane.items):
                return member._replace(lane=lane._replace(is_held=False)), []  # the server has lost that it gave them
            else:
                for number in numbers:
                    lane = flows.arrived(lane, Item(number, 1), rules)
            if numbers and lane.newest is not None:
                lane = lane._replace(newest=numbers[-1])
        case "unpark":
            due = tuple((number_of(each[0]), each[1], False, bool(each[3])) for each in reply[2:])
            if lane.is_missing_retries:
                lane = restarted(member)._replace(is_missing_retries=False)
            lane = lane._replace(deferred=(*lane.deferred, *due))
        case "settle":
            lane = _without(lane, *command.args)
        case "settle_outputs":
            lane = _without(lane, *command.args[1:])
        case "hand_back":
            lane = lane._replace(leaving=3)
        case "start" | "park" | "bury":
            item = next(item for item in lane.items if item.number == command.args[0])
            item = item._replace(is_unsure=False)
            if word != NOT_PENDING and command.kind == "start" and lane.is_held:
                lane = _with(lane, item._replace(phase=GATHERED if rules.batch else RUNNING))
                started += [] if rules.batch else [item.number]
            elif word != NOT_PENDING and command.kind == "park" and rules.blocks(item.number):
                lane = _with(lane, item._replace(phase=PARKED))
            else:
                lane = _without(lane, item.number)
    return member._replace(lane=lane), started


def _claimed(lane: Lane, command: Command, reply: Any, rules: Rules) -> Lane:
    """`Reclaimer._claim_ids`: a page without bodies, which plain commands read."""
    _, following, lost, _, flat = reply
    lane = _without(lane, *map(number_of, lost))
    parts = iter(flat)
    rows = [
        (number_of(row[0]), row[1], row[2] > 0, bool(row[3])) for row in zip(parts, parts, parts, parts, strict=True)
    ]
    if not lane.is_restarted:
        lane = lane._replace(cursor=number_of(following) or None)
    lane = _enqueued(lane._replace(is_restarted=False), [row for row in rows if row[0] not in command.known], rules)
    return lane._replace(newest=0) if lane.cursor is None and lane.newest is None else lane


def unanswered(member: Member, command: Command) -> Member:
    """The connection was lost before the reply came."""
    member = _off_way(member, command)
    if command.role not in ("lease", "renew", "adopt"):  # these take any connection of the pool, the others have one
        member = member._replace(broken=member.broken | {command.role})
    if command.kind == "read":
        member = member._replace(is_read_late=True)
    lane = member.lane
    if lane is None or lane.grant != command.grant:
        return member
    match command.kind:
        case "read" | "claim" | "claim_ids":
            lane = restarted(member, is_ours=True)
        case "adopt":
            lane = restarted(member)
        case "unpark":
            lane = lane._replace(is_missing_retries=True)
        case "hand_back":
            lane = restarted(member)._replace(leaving=0)
        case "put_aside" if command.role == "lease":
            lane = restarted(member)._replace(leaving=0)
        case "settle" | "settle_outputs":
            is_unsure = command.kind == "settle_outputs"
            for item in lane.items:
                if item.phase == SETTLING:
                    lane = _with(lane, item._replace(phase=DONE, is_unsure=is_unsure))
        case "start" | "park" | "bury":
            item = next(item for item in lane.items if item.number == command.args[0])
            lane = _with(lane, item._replace(is_unsure=True))
    return member._replace(lane=lane)


def refused(member: Member, command: Command) -> Member:
    """The server answers with an error: a right is missing, a key has another type, a stream takes nothing."""
    broken, lane = member.broken, member.lane
    after = unanswered(member, command)
    if command.kind == "claim" or lane is None or lane.grant != command.grant:
        return after  # the reading connection is opened again
    after = after._replace(broken=broken)
    if command.kind == "settle":  # its lane is dropped, and all of it is taken over again
        return after._replace(lane=None)
    if command.kind in ("start", "park", "bury"):  # the same call again
        return after._replace(lane=lane)
    return after


def restarted(member: Member, *, is_ours: bool = False) -> Lane:
    """The lane, as it takes over everything that is pending again: `Lane.restart_recovery`."""
    assert member.lane is not None
    is_claiming = any(command.kind in ("claim", "claim_ids") for command in member.on_way)
    newest = member.lane.newest if is_ours else None
    return member.lane._replace(cursor=0, newest=newest, is_restarted=is_claiming)


def ended(lane: Lane, item: Item, error: Exception | None, rules: Rules) -> Lane:
    """A handler has ended."""
    decision = decide(error, item.attempt, rules.policy)
    if isinstance(decision, Park):
        return _with(lane, item._replace(phase=PARKING))
    if isinstance(decision, Bury):
        return _with(lane, item._replace(phase=BURYING, reason=str(decision.reason)))
    return _with(lane, item._replace(phase=DONE))


def batch_ended(lane: Lane, failed: Item | None, rules: Rules) -> tuple[Lane, set[int]]:
    """The call of a batch has ended, for one message with an error. Returns what is handled, too.

    Later messages of its key wait behind it again, if it is retried.
    """
    batch, handled = [item for item in lane.items if item.phase == RUNNING], set[int]()
    if failed is not None:
        lane = ended(lane, failed, ValueError(), rules)
    is_parked = failed is not None and isinstance(decide(ValueError(), failed.attempt, rules.policy), Park)
    for item in batch:
        if item == failed:
            continue
        if failed is not None and is_parked and failed.number in rules.before(item.number):
            lane = _with(lane, item._replace(phase=READY))
            continue
        handled.add(item.number)
        lane = _with(lane, item._replace(phase=DONE if failed is None or item.number < failed.number else HANDLED))
    return lane, handled


def resumed(lane: Lane, item: Item) -> Lane:
    """The timer of a parked message has fired."""
    return _with(lane, item._replace(phase=READY, attempt=item.attempt + 1, is_again=True))


def _off_way(member: Member, command: Command) -> Member:
    return member._replace(on_way=tuple(each for each in member.on_way if each != command))


def _enqueued(
    lane: Lane, entries: Iterable[tuple[int, int, bool, bool]], rules: Rules, *, is_retry: bool = False
) -> Lane:
    """`Reclaimer._enqueue`: entries are number, attempts charged, whether its retry is not due, whether it was ours."""
    for number, attempts, waits, is_ours in entries:
        if any(item.number == number for item in lane.items) or (is_retry and is_ours and rules.blocks(number)):
            continue
        is_first = not is_retry and attempts == 1 and is_ours and lane.newest is not None and number > lane.newest
        if is_first:
            lane, attempts = lane._replace(newest=number), 0
        condemned = None if is_retry else decide_redelivery(attempts, rules.policy)
        if condemned is not None:
            item = Item(number, attempts, BURYING, reason=str(condemned.reason))
        elif waits and rules.blocks(number) and not _is_behind(number, lane, rules):
            item = Item(number, attempts, PARKED)
        else:
            item = Item(number, attempts + 1, is_again=not is_first)
            if rules.room is not None:
                lane = flows.arrived(lane, item, rules)
                continue
        lane = lane._replace(items=(*lane.items, item))
    return lane


def _is_behind(number: int, lane: Lane, rules: Rules) -> bool:
    """Whether a parked message has earlier ones of its key here."""
    if rules.room is None:
        return _is_blocked(number, lane.items, rules)
    return flows.is_behind(lane, number, rules)


def _with(lane: Lane, changed: Item) -> Lane:
    return lane._replace(items=tuple(changed if each.number == changed.number else each for each in lane.items))


def _without(lane: Lane, *numbers: int) -> Lane:
    return lane._replace(items=tuple(each for each in lane.items if each.number not in numbers))
