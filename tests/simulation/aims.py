"""Faults that meet within milliseconds: a share of the seeds aims at one race, again and again, with little beside it.

A member is excused only from what its fault allows, so the verdict is stricter here than where a fault has any time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.simulation.faults import Fates
    from tests.simulation.network import SimulatedConnection
    from tests.simulation.run import Member, Run

AIMS_A_SECOND: Final = 0.5
LATE_CALLS: Final = (
    "park_message",
    "park_message",
    "start_message",
    "unpark_messages",
    "bury_message",
    "settle_outputs",
)
LATE_READ: Final = 4.0
"""Seconds after which a worker gives up a read that is not answered (lease of 3 s)."""


class Aims:
    """Plans and strikes what the aim of a seed needs."""

    def __init__(self, run: Run, fates: Fates) -> None:
        self._run, self._fates = run, fates

    def plan(self) -> None:
        """Put it on the agenda, several times."""
        run = self._run
        strike: Callable[[str, Member], None] = getattr(self, f"_{run.plan.aim.replace(' ', '_')}")
        for n in range(max(2, round(AIMS_A_SECOND * run.plan.seconds))):
            moment = run.world.choices.between(0.5, run.plan.seconds, f"aim {n} moment")
            run.world.at(moment, lambda name=f"aim {n}": self._begin(name, strike))  # type: ignore[misc]

    def _begin(self, name: str, strike: Callable[[str, Member], None]) -> None:
        choices = self._run.world.choices
        available = [member for member in self._run.members if member.is_available]
        available = [member for member in available if any(member.leases())] or available
        if available and choices.allows(f"{name}: {self._run.plan.aim}"):
            strike(name, choices.among(available, f"{name} victim"))

    def _between(self, low: float, high: float, name: str) -> float:
        return self._run.world.choices.between(low, high, name)

    def _trap(
        self, victim: Member, command: str, spring: Callable[[SimulatedConnection], None], skips: int = 0
    ) -> None:
        self._run.network.trap(victim.process.name, command, spring, skips=skips)

    def _others(self, victim: Member) -> list[Member]:
        return [member for member in self._run.members if member is not victim and member.is_available]

    def _hold(self, connection: SimulatedConnection, span: float) -> None:
        """What it sends now comes late."""
        connection.held_until = self._run.world.now + span
        self._run.world.note(f"{connection.label} is slow until {connection.held_until:.3f}")

    def _hold_replies(self, connection: SimulatedConnection, span: float) -> None:
        connection.last_in = max(connection.last_in, self._run.world.now + span)
        self._run.world.note(f"replies to {connection.label} are slow until {connection.last_in:.3f}")

    def _cut(self, victim: Member, span: float, spared: SimulatedConnection | None = None) -> None:
        """Its connections break, and it cannot open new ones for a while."""
        run = self._run
        self._fates.excuse(victim, "cut off")
        for connection in run.network.connections_of(victim.process.name):
            if connection is not spared:
                run.network.break_connection(connection)
        run.network.refuse(victim.process.name, run.world.now + span)

    def _break_reader(self, victim: Member) -> None:
        for connection in self._run.network.connections_of(victim.process.name):
            if connection.is_reader:
                self._run.network.break_connection(connection)

    # -- each aim -----------------------------------------------------------------------------------------------------

    def _late_call(self, name: str, victim: Member) -> None:
        """A call comes about when its sender has given it up and repeats it. Sometimes the worker is cancelled."""
        run, choices = self._run, self._run.world.choices
        is_cancelled = choices.unit(f"{name} cancelled") < 0.3

        def spring(connection: SimulatedConnection) -> None:
            if is_cancelled:  # then the call comes while it tidies up, which takes milliseconds
                pause = self._between(0, 0.1, f"{name} cancelled after")
                self._hold(connection, pause + self._between(0, 0.01, f"{name} late"))
                run.world.after(pause, cancel)
            else:
                self._hold(connection, run.plan.timeout + self._between(-0.1, 2.0, f"{name} late"))

        def cancel() -> None:
            if victim.is_available:
                self._fates.strike("cancel", name, victim)

        commands = (*LATE_CALLS, *["settle_outputs"] * 6) if run.plan.has_outputs else LATE_CALLS
        self._trap(victim, choices.among(commands, f"{name} command"), spring)

    def _late_claim(self, name: str, victim: Member) -> None:
        """The reading connection breaks, and the reply to the claim after that comes late."""
        span = self._between(0.01, 1, f"{name} late")
        skips = self._run.world.choices.among((0, 0, 1, 2), f"{name} skips")
        self._trap(victim, "claim_pending", lambda connection: self._hold_replies(connection, span), skips)
        self._break_reader(victim)

    def _lost_retry(self, name: str, victim: Member) -> None:
        """The reply to a call for due retries is lost, often while a claim is on its way that was sent before it."""
        is_claiming = self._run.world.choices.unit(f"{name} claims") < 0.7

        def spring(connection: SimulatedConnection) -> None:
            connection.breaks_after = connection.chunks
            if not is_claiming:
                return
            self._hold(connection, self._between(0.005, 0.3, f"{name} late"))
            span = self._between(0.1, 1, f"{name} claim late")
            self._trap(victim, "claim_pending", lambda claiming: self._hold_replies(claiming, span))
            self._break_reader(victim)

        self._trap(victim, "unpark_messages", spring)

    def _late_read(self, name: str, victim: Member) -> None:
        """A read comes about when its worker gives it up, which stops."""
        run = self._run

        def spring(connection: SimulatedConnection) -> None:
            self._hold(connection, LATE_READ + self._between(-0.2, 1.5, f"{name} late"))
            pause = self._between(0, 0.3, f"{name} stops after")
            run.world.after(pause, lambda: victim.is_available and self._fates.strike("stop", name, victim))

        self._trap(victim, "XREADGROUP", spring)

    def _lapse(self, name: str, victim: Member) -> None:
        """The reply to a read comes when the leases have lapsed and are granted again. Messages were in flight."""
        worker = victim.broker.worker

        def spring(connection: SimulatedConnection) -> None:
            if worker and not any(lane.in_flight for each in worker.consumers for lane in each.lanes.values()):
                self._trap(victim, "XREADGROUP", spring)
                return
            self._hold_replies(connection, self._between(1, 3.8, f"{name} late"))
            self._cut(victim, self._between(0.8, 1.05, f"{name} cut for"), connection)

        self._trap(victim, "XREADGROUP", spring)

    def _usurpation(self, name: str, victim: Member) -> None:
        """A read comes late, its worker is killed, and the next owners do not get the replies to their grants."""
        run = self._run

        def spring(connection: SimulatedConnection) -> None:
            self._hold(connection, self._between(1.2, 4, f"{name} late"))
            for other in self._others(victim):
                for skips in (run.world.choices.among((0, 1), f"{name} {other.number} skips"), 3):
                    self._fates.lose(f"{name} {other.number} {skips}", other, "take_lease", skips)
            run.world.after(0.001, lambda: victim.process.runs and self._fates.strike("kill", name, victim))

        self._trap(victim, "XREADGROUP", spring)

    def _late_audit(self, name: str, victim: Member) -> None:
        """The reply to a settlement comes after two audits, and the worker dies soon after that."""
        run = self._run

        def spring(connection: SimulatedConnection) -> None:
            span = self._between(5, 12, f"{name} late")
            self._hold_replies(connection, span)
            run.last_until(run.world.now + span + 8)
            pause = span + self._between(0, 5, f"{name} dies after")
            run.world.after(pause, lambda: victim.is_available and self._fates.strike("kill", name, victim))

        self._trap(victim, "settle_messages", spring)

    def _stop_in_a_grant(self, name: str, _: Member) -> None:
        """A worker joins, and the simulator stops it while it takes a lease."""
        run = self._run
        joined = run.start_member()

        def stop() -> None:
            if joined.is_available:
                run.world.note(f"the simulator stops m{joined.number}")
                joined.is_stopping = True
                joined.process.loop.call_soon(joined.broker.stop)

        def spring(_: SimulatedConnection) -> None:
            run.world.after(self._between(0, 0.0015, f"{name} stops after"), stop)

        self._trap(joined, "take_lease", spring, run.world.choices.among((0, 1, 2), f"{name} skips"))

    def _no_script(self, name: str, victim: Member) -> None:
        """The server has forgotten a script, and is away when the call comes again with its source."""
        run = self._run

        def spring(_: SimulatedConnection) -> None:
            self._fates.strike("flush", name, victim)
            self._trap(victim, "settle_messages", again)

        def again(connection: SimulatedConnection) -> None:
            run.network.refuse(victim.process.name, run.world.now + self._between(0.05, 0.7, f"{name} away"))
            run.network.break_connection(connection)

        self._trap(victim, "settle_messages", spring)

    def _clock_back(self, name: str, victim: Member) -> None:
        """The clock is set back while a message is parked."""
        run = self._run

        def spring(_: SimulatedConnection) -> None:
            offset = run.world.choices.among((-20.0, -3600.0), f"{name} offset")
            if offset < run.network.offset:
                pause = self._between(0, 0.4, f"{name} pause")
                run.world.after(pause, lambda: self._fates.step(offset))

        self._trap(victim, "park_message", spring)

    def _cut_in_a_pause(self, name: str, victim: Member) -> None:
        """A worker is paused for longer than the grace, and its connections break meanwhile."""
        run = self._run
        self._fates.excuse(victim, "frozen")
        victim.process.freeze()
        span = self._between(1.1, 2.6, f"{name} thawed")
        refused = self._between(0.5, span + 0.5, f"{name} cut for")
        run.world.after(self._between(0, 0.1, f"{name} cut"), lambda: self._cut(victim, refused))
        run.world.after(span, victim.process.thaw)

    def _return(self, name: str, victim: Member) -> None:
        """A worker is back when others, whose call is late, take its leases."""
        self._cut(victim, self._between(0.9, 1.3, f"{name} cut for"))
        for other in self._others(victim):
            span = self._between(0.02, 0.6, f"{name} {other.number} late")
            skips = self._run.world.choices.among((0, 1, 1), f"{name} {other.number} skips")
            self._trap(other, "take_lease", lambda connection, span=span: self._hold(connection, span), skips)  # type: ignore[misc]

    def _short_return(self, name: str, victim: Member) -> None:
        """The presence of a worker is back for less than the time between two looks of the others. Or it begins late,
        and breaks as soon."""
        run = self._run
        is_first = run.world.choices.unit(f"{name} first") < 0.4
        struck = run.start_member() if is_first else victim

        def spring(connection: SimulatedConnection) -> None:
            span = self._between(1, 2, f"{name} cut again for")
            pause = self._between(0.001, 0.25, f"{name} cut again")
            if is_first:
                late = self._between(0.6, 0.99, f"{name} late")
                self._hold(connection, late)
                pause += late
            run.world.after(pause, lambda: struck.process.runs and self._cut(struck, span))

        if not is_first:
            self._cut(struck, self._between(0.2, 0.6, f"{name} cut for"))
        self._trap(struck, "SUBSCRIBE", spring, int(is_first))  # the first one looks whether it may
