"""What happens to members: planned from the seed, each with a name by which it can be left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.plan import Fault

if TYPE_CHECKING:
    from tests.simulation.run import Member, Run


class Fates:
    """Plans the faults of a run and inflicts them. `excused`: members whose messages may be handled twice, and why."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.excused: dict[int, str] = {}

    def plan(self) -> None:
        """Put the seed's faults on the agenda."""
        run, choices = self._run, self._run.world.choices
        for n in range(2 + int(choices.unit("faults") * 5)):
            kind = choices.among(run.plan.faults, f"fault {n} kind")
            moment = choices.between(1.0, run.plan.seconds, f"fault {n} moment")
            run.world.at(moment, lambda n=n, kind=kind, moment=moment: self._begin(n, kind, moment))  # type: ignore[misc]

    def _begin(self, n: int, kind: Fault, moment: float) -> None:
        """A fault, and often a second one for the same member shortly afterwards: most defects need two that meet."""
        run, choices = self._run, self._run.world.choices
        available = [member for member in run.members if member.is_available]
        if not available or not choices.allows(f"fault {n}: {kind} at {moment:.3f}"):
            return
        victim = choices.among(available, f"fault {n} victim")
        if choices.unit(f"fault {n} publisher") < 0.15:
            self._break_publisher()
        self._strike(kind, f"fault {n}", victim)
        if choices.unit(f"fault {n} pair") < 0.6:
            second = choices.among(run.plan.faults, f"fault {n} second")
            pause = choices.between(0, 1, f"fault {n} second after") ** 2
            name = f"fault {n}: {second} {pause:.3f} s later"

            def follow() -> None:
                if victim.process.runs and choices.allows(name):
                    self._strike(second, f"fault {n} second", victim)

            run.world.after(pause, follow)

    def _strike(self, kind: Fault, name: str, victim: Member) -> None:
        getattr(self, f"_{kind}")(name, victim)

    def _break_publisher(self) -> None:
        """Its connections break: it finds out what was stored, and stores nothing twice."""
        for connection in self._run.network.connections_of("p"):
            self._run.network.break_connection(connection)

    def _kill(self, name: str, victim: Member) -> None:
        self.excused[victim.number] = "killed"
        victim.process.kill()
        self._replace(name)

    def _freeze(self, name: str, victim: Member) -> None:
        self.excused[victim.number] = "frozen"
        victim.process.freeze()
        span = self._run.world.choices.between(0.3, 3 * self._run.plan.lease, f"{name} thawed")
        self._run.world.after(span, victim.process.thaw)

    def _cut(self, name: str, victim: Member) -> None:
        """Most of its connections break."""
        run = self._run
        self.excused[victim.number] = "cut off"
        for connection in run.network.connections_of(victim.process.name):
            if run.world.choices.unit(f"{name} {connection.label}") < 0.6:
                run.network.break_connection(connection)

    def _late(self, name: str, victim: Member) -> None:
        """One of its connections, often the reading one, is slow: nothing is lost, but it comes late."""
        run, choices = self._run, self._run.world.choices
        connections = run.network.connections_of(victim.process.name)
        if not connections:
            return
        self.excused[victim.number] = "a command came late"
        readers = [connection for connection in connections if connection.is_reader] or connections
        connection = choices.among(
            readers if choices.unit(f"{name} reader") < 0.5 else connections, f"{name} connection"
        )
        connection.held_until = run.world.now + choices.between(1, 8, f"{name} late")
        run.world.note(f"{connection.label} is slow until {connection.held_until:.3f}")

    def _stop(self, name: str, victim: Member) -> None:
        """A planned stop, as SIGTERM does it."""
        self._run.world.note(f"m{victim.number} is told to stop")
        victim.is_stopping = True
        victim.process.loop.call_soon(victim.broker.stop)
        self._replace(name)

    def _replace(self, name: str) -> None:
        self._run.world.after(self._run.world.choices.between(0.1, 3, f"{name} replaced"), self._run.start_member)
