"""What can happen next, and what must hold after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from rsmq.redis.scripts import OK, STALE_EPOCH
from tests.interleavings.member import (
    answered,
    batch_ended,
    ended,
    pump,
    refused,
    restarted,
    resumed,
    unanswered,
)
from tests.interleavings.rules import Rules
from tests.interleavings.store import Store
from tests.interleavings.world import PARKED, RUNNING, Command, Lane, Left, Member, Opening, Server, Truth, World

ACTS: Final = {
    "renew": "renewal",
    "release": "release",
    "claim": "take-over of pending messages",
    "adopt": "adoption",
    "touch": "touch",
    "remove": "removal of its consumer",
    "read": "read",
    "start": "start",
    "park": "parking",
    "unpark": "call for due retries",
    "bury": "dead letter",
    "settle": "settlement",
    "settle_outputs": "settlement with outputs",
    "hand_back": "hand-back",
    "claim_ids": "take-over of pending ids",
    "put_aside": "putting aside",
    "read_again": "second read",
}


REFUSABLE: Final = {"claim", "adopt", "start", "park", "unpark", "bury", "settle", "settle_outputs", "hand_back"}


class Move(NamedTuple):
    """A step to another state. `is_fault`: it must not be needed to get ahead. `broken`: the promise that it breaks."""

    text: str
    world: World
    is_fault: bool = False
    broken: str = ""


class Broken(Exception):
    """A promise is broken."""


class Moves:
    """All orders of one scenario."""

    def __init__(self, store: Store, rules: Rules, left: Left) -> None:
        self._store, self._rules, self._left = store, rules, left
        self._all = frozenset(range(1, len(rules.keys) + 1))

    def begin(self) -> World:
        """All messages are published, and two members know of each other."""
        server = self._store.begin(self._rules.keys)
        return World(server, (Member("m1"), Member("m2")), frozenset(), self._left, Truth())

    def is_done(self, world: World) -> bool:
        """Whether every message is settled or a dead letter."""
        server = world.server
        return server.delivered == len(self._all) and not server.pending and not server.parked

    def after(self, world: World) -> Iterator[Move]:
        """Every step that is possible in a state."""
        for index, member in enumerate(world.members):
            if member.is_alive:
                yield from self._of_member(world, index, member)
            for command in member.on_way:
                yield from self._arrival(world, command, index)
        for command in sorted(world.late, key=str):
            yield from self._arrival(world, command)
        yield from self._losses(world)
        yield from self._time(world)

    # -- what a member does by itself -----------------------------------------------------------------------------

    def _of_member(self, world: World, index: int, member: Member) -> Iterator[Move]:
        lane, name, left = member.lane, member.name, world.left
        if member.opening is not None:
            yield from self._cut_off(world, index, member, member.opening)
        elif lane is None and "fetch" not in member.broken and (world.truth.grants or member is _first(world)):
            yield from self._take(world, index, member)
        for role in sorted(member.broken):
            yield self._changed(f"{name} connects again ({role})", *self._connected(world, index, member, role))
        if lane is not None:
            yield from self._of_lane(world, index, member, lane)
        is_replaceable = all(each.is_alive for each in world.members)
        if left.crashes and is_replaceable:
            after = world._replace(left=left._replace(crashes=left.crashes - 1))
            yield self._gone(f"{name} dies", after, index, member)
        if left.stops and is_replaceable and lane and lane.is_held and _is_idle(lane):
            yield self._stopped(world._replace(left=left._replace(stops=left.stops - 1)), index, member, lane)

    def _of_lane(self, world: World, index: int, member: Member, lane: Lane) -> Iterator[Move]:
        name, left = member.name, world.left
        if not lane.is_held:
            yield self._changed(f"{name} sees that its lease is over", world, index, member._replace(lane=None))
        if self._rules.batch and any(item.phase == RUNNING for item in lane.items):
            yield from self._batch_ended(world, index, member, lane)
        for item in lane.items:
            if item.phase == RUNNING and not self._rules.batch:
                number = item.number
                after = world._replace(truth=world.truth._replace(handled=world.truth.handled | {number}))
                done = member._replace(lane=ended(lane, item, None, self._rules))
                yield self._changed(f"{name} has handled {number}", after, index, done)
                if left.failures:
                    after = world._replace(left=left._replace(failures=left.failures - 1))
                    failed = member._replace(lane=ended(lane, item, ValueError(), self._rules))
                    text = f"the handler of {number} fails in {name}"
                    yield self._changed(text, after, index, failed, is_fault=True)
            elif item.phase == PARKED:
                due = member._replace(lane=resumed(lane, item))
                yield self._changed(f"{name}'s timer for {item.number} is over", world, index, due)
        is_asked = not lane.deferred and (lane.is_missing_retries or any(each[2] for each in world.server.parked))
        if is_asked and lane.is_held and lane.cursor is None and not lane.leaving and member.is_free("poll"):
            command = Command("unpark", "poll", name, lane.grant, lane.epoch)
            after = member._replace(on_way=(*member.on_way, command))
            yield self._changed(f"{name} asks for due retries", world, index, after)
        if lane.is_held and not lane.leaving and left.handovers and member.opening is None:
            after = world._replace(left=left._replace(handovers=left.handovers - 1))
            leaving = member._replace(lane=lane._replace(leaving=1))
            yield self._changed(f"{name} begins to hand its partition over", after, index, leaving, is_fault=True)
        if left.renewals and member.is_free("renew"):
            command = Command("renew", "renew", name, lane.grant, lane.epoch)
            after = world._replace(left=left._replace(renewals=left.renewals - 1))
            renewing = member._replace(on_way=(*member.on_way, command))
            yield self._changed(f"{name} renews its lease", after, index, renewing, is_fault=True)

    def _batch_ended(self, world: World, index: int, member: Member, lane: Lane) -> Iterator[Move]:
        fails = [item for item in lane.items if item.phase == RUNNING and world.left.failures]
        for failed in (None, *fails):
            changed, handled = batch_ended(lane, failed, self._rules)
            after = world._replace(truth=world.truth._replace(handled=world.truth.handled | handled))
            text = f"{member.name} has handled {_listed(handled) or 'nothing'} of a batch"
            if failed is not None:
                after = after._replace(left=world.left._replace(failures=world.left.failures - 1))
                text += f", and {failed.number} fails"
            done = member._replace(lane=changed)
            yield self._changed(text, after, index, done, is_fault=failed is not None)

    def _stopped(self, world: World, index: int, member: Member, lane: Lane) -> Move:
        late = member.is_read_late or any(command.kind == "read" for command in member.on_way)
        release = Command("release", "lease", member.name, lane.grant, lane.epoch, (member.reader if late else "",))
        after = world._replace(late=world.late | {release})
        return self._gone(f"{member.name} stops{', its read still on the way' if late else ''}", after, index, member)

    def _gone(self, text: str, world: World, index: int, member: Member) -> Move:
        late = world.late.union(member.on_way)
        gone = Member(member.name, is_alive=False)
        return self._changed(text, world._replace(late=late), index, gone, is_fault=True)

    def _connected(self, world: World, index: int, member: Member, role: str) -> tuple[World, int, Member]:
        """It ends its last connection in the server first: see `RawConnection.open` and `Fetcher._connect`."""
        mine = {command for command in world.late if (command.member, command.role) == (member.name, role)}
        if role == "fetch":  # a claim was not on this connection
            mine = {command for command in mine if command.kind == "read"}
            member = member._replace(connection=member.connection + 1, is_read_late=False)
        elif not self._rules.ends_late:
            mine = set()
        return world._replace(late=world.late - mine), index, member._replace(broken=member.broken - {role})

    # -- leases ---------------------------------------------------------------------------------------------------

    def _take(self, world: World, index: int, member: Member) -> Iterator[Move]:
        owner = world.server.owner
        for absent in ("", owner) if owner not in ("", member.name) and not world.server.is_over else ("",):
            command = Command("take", "lease", member.name, args=(member.reader, absent))
            reply, server = self._store.execute(world.server, command, _alive(world))
            if reply[0] != OK:
                continue
            after, opening = _granted(world._replace(server=server), member.name, reply)
            text = f"{member.name} takes the lease{f' of {absent}, which looks dead' if absent else ''}"
            yield self._opened(f"{text}: epoch {opening.epoch}", after, index, member, opening)
            if world.left.lost:
                text = f"{text}, but the connection breaks before the reply"
                yield Move(text, _lost(world, {command}), is_fault=True)

    def _opened(self, text: str, world: World, index: int, member: Member, opening: Opening) -> Move:
        """The lane of a new lease, once no other member reads."""
        if opening.readers:
            return self._changed(text, world, index, member._replace(opening=opening))
        lane = Lane(opening.grant, opening.epoch, opening.is_held)
        return self._changed(text, world, index, member._replace(opening=None, lane=lane))

    def _cut_off(self, world: World, index: int, member: Member, opening: Opening) -> Iterator[Move]:
        readers = opening.readers
        late = frozenset(each for each in world.late if not (each.kind == "read" and each.args[0] in readers))
        world = world._replace(late=late, members=tuple(_without_reader(each, readers) for each in world.members))
        member = world.members[index]
        text = f"{member.name} cuts off the last reader"
        yield self._opened(text, world, index, member, opening._replace(readers=()))
        if world.left.lost:
            text = f"{text}, but the connection breaks before the reply"
            yield self._changed(text, _lost(world), index, member._replace(opening=None), is_fault=True)

    # -- the network ----------------------------------------------------------------------------------------------

    def _arrival(self, world: World, command: Command, index: int | None = None) -> Iterator[Move]:
        """A command reaches the server. Without a place its sender waits no more."""
        text = f"{'late: ' if index is None else ''}{command.member}'s {_described(command)}"
        reply, server = self._store.execute(world.server, command, _alive(world))
        broken = self._unfenced(world, command, reply) or _uncharged(command, reply, server)
        broken = broken or self._taken(world, command, server)
        settled = world.truth.settled.union(self._settled(world, command, reply, server))
        after = world._replace(server=server, truth=world.truth._replace(settled=settled))
        if world.left.losses and command.kind == "park" and reply[0] == OK:
            retried = after.truth.retried | {command.args[:2]}
            after = after._replace(truth=after.truth._replace(retried=retried))
        if index is None:
            after = after._replace(late=world.late - {command})
            if command.kind == "take" and reply[0] == OK:
                after, _ = _granted(after, command.member, reply)
            yield self._checked(f"{text} → {_shown(reply)}", after, broken=broken)
            return
        member, started = answered(world.members[index], command, reply, self._rules)
        yield self._changed(f"{text} → {_shown(reply)}", after, index, member, started, broken=broken)
        yield from self._refusals(world, command, index, text)
        if world.left.lost and command.kind not in ("renew", "release", "touch"):
            member = unanswered(world.members[index], command)
            text = f"the connection of {text} breaks before the reply"
            yield self._changed(text, _lost(world, {command}), index, member, is_fault=True)

    def _refusals(self, world: World, command: Command, index: int, text: str) -> Iterator[Move]:
        """The server refuses one of the writes of a command."""
        if not world.left.refusals or command.kind not in REFUSABLE:
            return
        left = world.left._replace(refusals=world.left.refusals - 1)
        for server, name in self._store.refusals(world.server, command).items():
            after = world._replace(server=server, left=left)
            member = refused(world.members[index], command)
            yield self._changed(f"{text} is refused: {name}", after, index, member, is_fault=True)

    def _settled(self, world: World, command: Command, reply: Any, server: Server) -> Iterable[int]:
        """What a command has acknowledged."""
        if command.kind == "settle" and reply[0][0] == OK:
            return command.args
        return command.args[1:] if command.kind == "settle_outputs" and reply[0] == OK else ()

    def _taken(self, world: World, command: Command, server: Server) -> str:
        """Whether a command has changed what it must leave alone."""
        return ""

    def _unfenced(self, world: World, command: Command, reply: Any) -> str:
        """Only the last grant may write."""
        if command.kind in ("read", "take") or (command.member, command.grant) == world.truth.holder:
            return ""
        word = reply[0][0] if command.kind == "settle" else reply[0] if isinstance(reply, list) else reply
        return "" if word == STALE_EPOCH else f"the {ACTS[command.kind]} was accepted, but another grant has the lease"

    # -- a failover -----------------------------------------------------------------------------------------------

    def _losses(self, world: World) -> Iterator[Move]:
        """The server forgets the last start of a message, after which nothing came of it. One that has kept its place
        while it waited for its retry is parked again."""
        parked = {number for number, *_ in world.server.parked}
        for number, _, attempts, _ in world.server.pending if world.left.losses else ():
            if attempts > 1 and number not in parked:
                was_parked = (number, attempts - 1) in world.truth.retried and self._rules.blocks(number)
                server = self._store.lose_start(world.server, number, was_parked=was_parked)
                after = world._replace(server=server, left=world.left._replace(losses=world.left.losses - 1))
                yield self._checked(f"a failover loses the last start of {number}", after, is_fault=True)

    # -- time -----------------------------------------------------------------------------------------------------

    def _time(self, world: World) -> Iterator[Move]:
        if not all(is_due for *_, is_due in world.server.parked):
            server = self._store.pass_retry(world.server)
            yield self._checked("time passes: the next retry is due", world._replace(server=server))
        if world.server.is_over:
            return
        believers = [member for member in world.members if _believes(member)]
        if believers and not world.left.pauses:
            return
        members = tuple(_paused(member) for member in world.members)
        after = world._replace(server=self._store.pass_lease(world.server), members=members)
        if believers:
            after = after._replace(left=world.left._replace(pauses=world.left.pauses - 1))
        names = "".join(f", and {member.name} has slept all the while" for member in believers)
        yield self._checked(f"time passes: the lease is over{names}", after, is_fault=bool(believers))

    # -- what must hold -------------------------------------------------------------------------------------------

    def _changed(
        self,
        text: str,
        world: World,
        index: int,
        member: Member,
        started: Iterable[int] = (),
        *,
        is_fault: bool = False,
        broken: str = "",
    ) -> Move:
        """A member has changed: it goes on as far as it can, and handlers start."""
        member, more = pump(member, self._rules)
        members = (*world.members[:index], member, *world.members[index + 1 :])
        started = [*started, *more]
        if started:
            text += f"; it starts {_listed(started)}"
        for number in started:
            broken = broken or self._wrong_start(world, number, started if self._rules.batch else ())
        return self._checked(text, world._replace(members=members), is_fault=is_fault, broken=broken)

    def _wrong_start(self, world: World, number: int, together: Iterable[int]) -> str:
        truth, dead = world.truth, {number for number, _ in world.server.dead}
        missing = [each for each in self._rules.before(number) if each not in truth.handled.union(dead, together)]
        if missing:
            return f"{number} starts before {_listed(missing)} of the same key"
        if number in truth.settled:
            return f"{number} starts again after it was settled"
        if number in dead:
            return f"{number} starts although it is a dead letter"
        if number in truth.handled and (world.left[:3], world.left.refusals) == (self._left[:3], self._left.refusals):
            return f"{number} is handled twice without a fault"
        return ""

    def _checked(self, text: str, world: World, *, is_fault: bool = False, broken: str = "") -> Move:
        return Move(text, world, is_fault, broken or self._fault(world))

    def _fault(self, world: World) -> str:
        believers = [member.name for member in world.members if _believes(member)]
        return "two members believe in the lease" if len(believers) > 1 else self._wrong_records(world)

    def _wrong_records(self, world: World) -> str:
        server = world.server
        dead = [number for number, _ in server.dead]
        if len(dead) != len(set(dead)):
            return "a message has two dead letters"
        both = world.truth.settled.intersection(dead)
        if both:
            return f"{_listed(both)} was settled and is a dead letter"
        if self._rules.has_outputs and (wrong := self._wrong_outputs(server.outputs, world.truth.settled)):
            return wrong
        there = {each[0] for each in server.pending + server.parked}.union(dead, world.truth.settled)
        there |= self._is_known(world)
        lost = [number for number in self._all if number <= server.delivered and number not in there]
        return f"{_listed(lost)} is lost: neither pending nor parked, settled or a dead letter" if lost else ""

    def _is_known(self, world: World) -> set[int]:
        """What is not lost although the server does not have it."""
        return set()

    def _wrong_outputs(self, outputs: tuple[int, ...], settled: frozenset[int]) -> str:
        """Those of each settled message are stored once, of no other, and in the order of their keys."""
        if len(outputs) != len(set(outputs)):
            return "an output is stored twice"
        if settled != set(outputs):
            return f"settled: {_listed(settled) or 'none'}, with outputs: {_listed(outputs) or 'none'}"
        for number in outputs:
            if not set(self._rules.before(number)).isdisjoint(outputs[outputs.index(number) :]):
                return f"the output of {number} is stored before that of an earlier message of its key"
        return ""


def _alive(world: World) -> frozenset[str]:
    return frozenset(member.name for member in world.members if member.is_alive)


def _is_idle(lane: Lane) -> bool:
    return all(item.phase == PARKED for item in lane.items)


def _believes(member: Member) -> bool:
    return bool((member.lane and member.lane.is_held) or (member.opening and member.opening.is_held))


def _paused(member: Member) -> Member:
    if member.lane is not None:
        member = member._replace(lane=member.lane._replace(is_held=False))
    if member.opening is not None:
        member = member._replace(opening=member.opening._replace(is_held=False))
    return member


def _without_reader(member: Member, readers: Iterable[str]) -> Member:
    """Its reading connection is closed by another member."""
    if not member.is_alive or member.reader not in readers or "fetch" in member.broken:
        return member
    left = tuple(command for command in member.on_way if command.kind != "read")
    lane = restarted(member, is_ours=True) if member.lane is not None else None
    return member._replace(on_way=left, lane=lane, broken=member.broken | {"fetch"})


def _granted(world: World, name: str, reply: Any) -> tuple[World, Opening]:
    truth = world.truth._replace(grants=world.truth.grants + 1)
    truth = truth._replace(holder=(name, truth.grants))
    readers = tuple(reply[3].decode().splitlines())
    return world._replace(truth=truth), Opening(truth.grants, reply[1].decode(), True, readers)


def _lost(world: World, commands: Iterable[Command] = ()) -> World:
    left = world.left._replace(lost=world.left.lost - 1)
    return world._replace(left=left, late=world.late.union(commands))


def _uncharged(command: Command, reply: Any, server: Server) -> str:
    """A handler that starts must have been charged, or a message that kills its process never ends."""
    if (
        command.kind != "start"
        or reply[0] != OK
        or (command.args[0], command.member, command.args[1]) in {each[:3] for each in server.pending}
    ):
        return ""
    return f"attempt {command.args[1]} of {command.args[0]} starts without being charged"


def _described(command: Command) -> str:
    match command.kind:
        case "start" | "park" | "bury":
            return f"{ACTS[command.kind]} of {command.args[0]}"
        case "settle":
            return f"settlement of {_listed(command.args)}"
        case "settle_outputs":
            return f"settlement with outputs of {_listed(command.args[1:])}"
        case "take":
            return "request for the lease"
    return ACTS[command.kind]


def _shown(reply: Any) -> str:
    """A reply, for people."""
    match reply:
        case bytes():
            return reply.decode()
        case [[bytes() as word, *_]] if word.isupper():
            return word.decode()
        case [[bytes(), list() as entries]]:
            return f"gets {_listed(int(entry_id.partition(b'-')[0]) for entry_id, _ in entries)}"
        case [bytes() as word, *rest]:
            got = [int(each[0].partition(b"-")[0]) for each in rest if isinstance(each, list) and each]
            return f"{word.decode()}{f', gets {_listed(got)}' if got else ''}"
    return "nothing new"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _first(world: World) -> Member:
    """The one that asks first: the two are alike, so it is always the same."""
    return next(member for member in world.members if member.is_alive)
