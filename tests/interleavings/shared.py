"""Shared distribution: what can happen next and what must hold where each message, not the partition, has an owner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from tests.interleavings.moves import Move, Moves
from tests.interleavings.world import RUNNING, Command, Lane, Member, Server, World

ADOPTING: Final = ("adopt", "unpark")
"""Commands that may take a message from another member."""


class SharedMoves(Moves):
    """Each member reads the partition. It adopts what a dead member left, and what was not touched for a lease."""

    def _take(self, world: World, index: int, member: Member) -> Iterator[Move]:
        number = member.lanes + 1
        opened = member._replace(lane=Lane(number, "", True), lanes=number)
        after = world._replace(truth=world.truth._replace(grants=1))
        yield self._changed(f"{member.name} opens the partition", after, index, opened)

    def _of_lane(self, world: World, index: int, member: Member, lane: Lane) -> Iterator[Move]:
        yield from super()._of_lane(world, index, member, lane)
        if not lane.is_held:
            return
        held = {item.number for item in lane.items}
        rows = world.server.pending
        dead = {each.name for each in world.members if not each.is_alive}
        sources = sorted({row[1] for row in rows if row[1] in dead})
        sources += [""] if any(row[3] for row in rows) else []
        for source in sources if member.is_free("adopt") else ():
            command = Command("adopt", "adopt", member.name, lane.grant, "", (source,), frozenset(held))
            text = f"{member.name} adopts what {source} left" if source else f"{member.name} looks for idle messages"
            yield self._changed(text, world, index, member._replace(on_way=(*member.on_way, command)))
        # only where a touch changes something, or may be on its way while the member sleeps
        is_due = bool(world.left.pauses) or any(row[1] != member.name or row[3] for row in rows if row[0] in held)
        if held and member.is_free("touch") and is_due:
            command = Command("touch", "touch", member.name, lane.grant, "", tuple(sorted(held)))
            text = f"{member.name} touches {', '.join(map(str, sorted(held)))}"
            yield self._changed(text, world, index, member._replace(on_way=(*member.on_way, command)))

    def _stopped(self, world: World, index: int, member: Member, lane: Lane) -> Move:
        """Its late read is ended first."""
        command = Command("remove", "lease", member.name, lane.grant)
        late = {each for each in world.late if not (each.kind == "read" and each.member == member.name)}
        rest = member._replace(on_way=tuple(each for each in member.on_way if each.kind != "read"))
        return self._gone(f"{member.name} stops", world._replace(late=frozenset({*late, command})), index, rest)

    def _time(self, world: World) -> Iterator[Move]:
        """A lease passes. What no member touches is idle then; a member that sleeps meanwhile touches nothing."""
        for sleeper in (None, *(member for member in world.members if world.left.pauses and _believes(member))):
            awake = [each for each in world.members if each is not sleeper and _believes(each)]
            touched = {(item.number, each.name) for each in awake if each.lane for item in each.lane.items}
            idle = frozenset(row[0] for row in world.server.pending if row[:2] not in touched)
            is_new = any(row[0] in idle and not row[3] for row in world.server.pending)
            if sleeper is None and not is_new and all(each[2] for each in world.server.parked):
                continue
            after = world._replace(server=self._store.pass_idle(world.server, idle))
            text = "time passes: a lease"
            if sleeper is not None and sleeper.lane is not None:
                slept = sleeper._replace(lane=sleeper.lane._replace(is_held=False))
                members = tuple(slept if each is sleeper else each for each in world.members)
                after = after._replace(members=members, left=world.left._replace(pauses=world.left.pauses - 1))
                text += f", and {sleeper.name} has slept all the while"
            yield self._checked(text, after, is_fault=sleeper is not None)

    # -- what must hold -------------------------------------------------------------------------------------------

    def _unfenced(self, world: World, command: Command, reply: Any) -> str:
        return ""  # see `_taken`

    def _settled(self, world: World, command: Command, reply: Any, server: Server) -> Iterable[int]:
        numbers = command.args[1:] if command.kind == "settle_outputs" else command.args
        if command.kind not in ("settle", "settle_outputs"):
            return ()
        before = {row[0] for row in world.server.pending}
        return [number for number in numbers if number in before - {row[0] for row in server.pending}]

    def _taken(self, world: World, command: Command, server: Server) -> str:
        """Only an adoption may touch what another member has."""
        others = {row for row in world.server.pending if row[1] != command.member}
        changed = sorted(row[0] for row in others.difference(server.pending))
        if not changed or command.kind in ADOPTING:
            return ""
        return f"the {command.kind} of {command.member} has changed {changed}, which another member has"

    def _fault(self, world: World) -> str:
        running = [
            item.number for member in world.members if _believes(member) and member.lane
            for item in member.lane.items if item.phase == RUNNING
        ]  # fmt: skip
        return "two members run the same message" if len(running) != len(set(running)) else self._wrong_records(world)


def _believes(member: Member) -> bool:
    return member.is_alive and member.lane is not None and member.lane.is_held
