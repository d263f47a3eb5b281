"""Where ids are kept: what else can happen, and what must hold of the counts of deliveries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import dropwhile, takewhile
from typing import Any

from tests.interleavings import flows
from tests.interleavings.commands import SETTINGS
from tests.interleavings.member import pump, restarted, unanswered
from tests.interleavings.moves import Move, Moves
from tests.interleavings.world import AWAY, Command, Lane, Member, Server, World


class FlowMoves(Moves):
    """A member keeps ids only of what cannot start soon.

    Another client may delete an entry or a consumer, and the server may fail over to a replica that has missed the last
    writes. What waits as an id has provably not started: its count of deliveries is 0. A handler's attempt is never
    lower than the number of its starts, or a message that kills its process would never be blamed; and it is not higher
    either, unless its member was lost while the server may have taken it for started.
    """

    def begin(self) -> World:
        world = super().begin()
        return world._replace(truth=world.truth._replace(starts=(0,) * len(self._rules.keys)))

    def after(self, world: World) -> Iterator[Move]:
        yield from super().after(world)
        yield from self._deletions(world)
        yield from self._failover(world)

    # -- faults ---------------------------------------------------------------------------------------------------

    def _deletions(self, world: World) -> Iterator[Move]:
        left, pending = world.left, {row[0] for row in world.server.pending}
        for member in world.members:
            away = [item.number for item in member.lane.items if item.phase == AWAY] if member.lane else []
            for number in away if left.deletions else ():
                if number in world.server.stored and number in pending:
                    server = self._store.delete(world.server, number)
                    after = world._replace(server=server, left=left._replace(deletions=left.deletions - 1))
                    yield self._checked(f"another client deletes {number}", after, is_fault=True)
            if left.unconsumed and away and any(row[1] == member.name for row in world.server.pending):
                server = self._store.unconsume(world.server, member.name)
                after = world._replace(server=server, left=left._replace(unconsumed=left.unconsumed - 1))
                yield self._checked(f"another client deletes the consumer {member.name}", after, is_fault=True)

    def _failover(self, world: World) -> Iterator[Move]:
        """To a replica that has missed the last writes, but not that the lease changed hands. Every connection breaks,
        and what was on its way is lost with the old master."""
        left, truth, server = world.left, world.truth, world.server
        replica = truth.replica
        if left.failovers and replica is None:
            yield self._checked(
                "a replica falls behind", world._replace(truth=truth._replace(replica=server)), is_fault=True
            )
        if not left.failovers or replica in (None, server) or replica is None:
            return
        if (replica.owner, replica.epoch, replica.reader) != (server.owner, server.epoch, server.reader):
            return
        pending = {row[0] for row in replica.pending}
        settled = frozenset(n for n in truth.settled if n <= replica.delivered and n not in pending)
        after = world._replace(
            server=replica, late=frozenset(), left=left._replace(failovers=left.failovers - 1),
            truth=truth._replace(settled=settled, replica=None), members=tuple(map(_cut_off, world.members)),
        )  # fmt: skip
        yield self._checked("a failover to the replica", after, is_fault=True)

    def _connected(self, world: World, index: int, member: Member, role: str) -> tuple[World, int, Member]:
        """A reader compares what it has with what the server has delivered: `Fetcher._drop_undelivered`."""
        late = world.late if role == "ahead" and "the end of late calls" in self._rules.without else frozenset()
        world, index, member = super()._connected(world, index, member, role)
        world = world._replace(late=world.late | late)
        lane, last = member.lane, world.server.delivered
        if role == "fetch" and lane is not None:
            unknown = {item.number for item in lane.items if item.phase != AWAY and item.number > last}
            lane = lane._replace(undelivered=frozenset(unknown))
            if any(item.phase == AWAY and item.number > last for item in lane.items):
                lane = lane._replace(is_held=False)
            member = member._replace(lane=lane)
        return world, index, member

    def _of_lane(self, world: World, index: int, member: Member, lane: Lane) -> Iterator[Move]:
        yield from super()._of_lane(world, index, member, lane)
        if lane.is_held and any(item.number in lane.undelivered for item in lane.items):
            lost = member._replace(lane=lane._replace(is_held=False))
            yield self._changed(f"{member.name} waits no longer for what is not delivered", world, index, lost)

    # -- what is counted ------------------------------------------------------------------------------------------

    def _changed(
        self, text: str, world: World, index: int, member: Member, started: Iterable[int] = (), **more: Any
    ) -> Move:
        member, fresh = pump(member, self._rules)
        started, old, truth = [*started, *fresh], world.members[index].lane, world.truth
        broken = more.pop("broken", "") or self._miscounted(world, member, started)
        starts = tuple(count + (number in started) for number, count in enumerate(truth.starts, 1))
        is_lost = old is not None and old.is_held and not (member.lane and member.lane.is_held) and old.leaving != 3
        is_lost |= old is not None and member.lane is not None and member.lane.leaving < old.leaving  # no hand-back
        is_lost |= old is not None and truth.holder != (member.name, old.grant)
        exposed = truth.exposed | (_exposed(world, world.members[index]) if is_lost else frozenset())
        world = world._replace(truth=truth._replace(starts=starts, exposed=exposed))
        return super()._changed(text, world, index, member, started, broken=broken, **more)

    def _miscounted(self, world: World, member: Member, started: Iterable[int]) -> str:
        if world.left.failovers != self._left.failovers or member.lane is None:
            return ""
        attempts = {item.number: item.attempt for item in member.lane.items}
        for number in started:
            attempt, least = attempts.get(number, 0), world.truth.starts[number - 1] + 1
            if attempt < least:
                return f"{number} starts as attempt {attempt}, although it has started {least - 1} times before"
            if attempt > least and number not in world.truth.exposed:
                return f"{number} starts as attempt {attempt}, although it has started {least - 1} times"
        return ""

    def _paused(self, world: World, member: Member) -> World:
        exposed = world.truth.exposed | _exposed(world, member)
        return world._replace(truth=world.truth._replace(exposed=exposed))

    def _time(self, world: World) -> Iterator[Move]:
        for member in world.members:
            if member.lane is not None and member.lane.is_held:
                world = self._paused(world, member)
        yield from super()._time(world)

    def _arrival(self, world: World, command: Command, index: int | None = None) -> Iterator[Move]:
        sender = next(member for member in world.members if member.name == command.member)
        lane = sender.lane
        is_ours = lane is not None and lane.is_held and lane.grant == command.grant
        is_given_up = not is_ours or (index is None and lane is not None and lane.leaving >= 2)
        if is_given_up and command.kind in ("read", "read_again"):  # it counts what no lane gets
            unread = [number for number in sorted(self._all) if number > world.server.delivered]
            numbers = command.args[2:] if command.kind == "read_again" else unread[: SETTINGS.prefetch // 2]
            truth = world.truth._replace(exposed=world.truth.exposed.union(numbers))
            world = world._replace(truth=truth)
        if index is not None and command.kind == "claim_ids":
            world, command = _skipped(world, command, index)
        yield from super()._arrival(world, command, index)

    def _settled(self, world: World, command: Command, reply: Any, server: Server) -> Iterable[int]:
        pending = {row[0] for row in world.server.pending}
        is_sure = world.left.failovers == self._left.failovers
        return [each for each in super()._settled(world, command, reply, server) if is_sure or each in pending]

    def _taken(self, world: World, command: Command, server: Server) -> str:
        """A planned handover leaves no count that no start explains."""
        is_calm = (world.left.crashes, world.left.pauses) == (self._left.crashes, self._left.pauses)
        if command.kind != "release" or server.owner or not is_calm or world.left.failovers != self._left.failovers:
            return ""
        starts, exposed = world.truth.starts, world.truth.exposed
        wrong = [row[0] for row in server.pending if row[2] > starts[row[0] - 1] and row[0] not in exposed]
        return f"{wrong} are given back, and count as started" if wrong else ""

    # -- what must hold -------------------------------------------------------------------------------------------

    def _wrong_start(self, world: World, number: int, together: Iterable[int]) -> str:
        wrong = super()._wrong_start(world, number, together)
        is_repeated = world.left[-3:] != self._left[-3:]
        return "" if is_repeated and wrong.endswith("is handled twice without a fault") else wrong

    def _fault(self, world: World) -> str:
        if wrong := super()._fault(world):
            return wrong
        counts = {row[0]: row[2] for row in world.server.pending}
        for member in world.members if world.left.failovers == self._left.failovers else ():
            lane = member.lane
            is_owner = lane is not None and lane.is_held and world.truth.holder == (member.name, lane.grant)
            if lane is not None and is_owner and (wrong_ids := flows.not_at_rest(lane, counts)):
                return f"{wrong_ids} wait as ids, and count as started"
        return ""

    def _is_known(self, world: World) -> set[int]:
        """What members have; after the deletion of a consumer they make it pending again."""
        lanes = [member.lane for member in world.members if member.lane is not None]
        is_needed = world.left.unconsumed != self._left.unconsumed
        return {item.number for lane in lanes for item in lane.items} if is_needed else set()


def _exposed(world: World, member: Member) -> frozenset[int]:
    """What the server may count as started when a member is lost: all but the ids that it has put aside."""
    lane = member.lane
    away = [item.number for item in lane.items if item.phase == AWAY] if lane is not None else []
    at_rest = {each for each in away if lane is not None and each not in (*lane.aside, *lane.asked)}
    return frozenset(row[0] for row in world.server.pending if row[1] == member.name and row[0] not in at_rest)


def _skipped(world: World, command: Command, index: int) -> tuple[World, Command]:
    """A claim begins at the first message that is not known, and ends before the next one that is:
    `Reclaimer._skip_known`. The look for it and the claim are one step here."""
    cursor, reader = command.args
    pending = [row[0] for row in world.server.pending if row[0] >= cursor]
    run = list(
        takewhile(lambda each: each not in command.known, dropwhile(lambda each: each in command.known, pending))
    )
    if not command.known or not pending:
        return world, command
    cursor, count = (run[0], len(run)) if run else (pending[-1] + 1, 1)
    following = command._replace(args=(cursor, reader, count))
    member = world.members[index]
    on_way = tuple(following if each == command else each for each in member.on_way)
    members = (*world.members[:index], member._replace(on_way=on_way), *world.members[index + 1 :])
    return world._replace(members=members), following


def _cut_off(member: Member) -> Member:
    """All its connections break."""
    for command in member.on_way:
        member = unanswered(member, command)
    if not member.is_alive:
        return member
    lane = restarted(member, is_ours=True) if member.lane is not None else None
    return member._replace(lane=lane, broken=member.broken | {"fetch"}, is_read_late=False)
