"""What happens to members: planned from the seed, each with a name by which it can be left out."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from rsmq.model.settings import heartbeat_interval, lease_margin
from rsmq.redis.scripts import RESET_GROUP
from tests.simulation.aims import Aims
from tests.simulation.limits import UNSURE
from tests.simulation.plan import (
    COMMANDS,
    DEVICE_COMMANDS,
    DIGEST_COMMANDS,
    FEED_COMMANDS,
    GATEWAY_COMMANDS,
    GROUP,
    GROUP_RATE_COMMANDS,
    HOT_COMMANDS,
    LAST_COMMANDS,
    OUTPUT_COMMANDS,
    QUIET_COMMANDS,
    RATE_COMMANDS,
    RESIZE_COMMANDS,
    TAKING,
    TOPIC,
    Fault,
)  # fmt: skip
from tests.simulation.unwatched import Unwatched

if TYPE_CHECKING:
    from tests.simulation.network import SimulatedConnection
    from tests.simulation.run import Member, Run

FAULTS_A_SECOND: Final = (0.15, 0.7)
AUDITED_AFTER: Final = 15.0
"""Seconds after which the audit has found the messages of a deleted consumer; until then no list names them."""


class Fates:
    """Plans the faults of a run and inflicts them. `excused`: members whose messages may be handled twice, and why."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.excused: dict[int, str] = {}
        self._was_unleased = self._was_set_back = False
        self._slow = defaultdict[str, list[tuple[float, float]]](list)
        run.network.on_slow_heartbeat = self._note_slow

    def plan(self) -> None:
        """Put the seed's faults on the agenda."""
        run, choices = self._run, self._run.world.choices
        if run.plan.aim:
            Aims(run, self).plan()
        if run.plan.unwatched:
            Unwatched(run).plan()
        if not run.plan.faults:
            return
        many = choices.between(*FAULTS_A_SECOND, "faults") * run.plan.seconds
        for n in range(max(1, round(many))):
            kind = choices.among(run.plan.faults, f"fault {n} kind")
            moment = choices.between(1.0, run.plan.seconds, f"fault {n} moment")
            run.world.at(moment, lambda n=n, kind=kind, moment=moment: self._begin(n, kind, moment))  # type: ignore[misc]
        if run.plan.halts:
            run.world.at(choices.between(1.0, run.plan.seconds, "halt moment"), self._halt)
        if run.plan.hangs:
            run.world.at(choices.between(1.0, run.plan.seconds, "hang moment"), self._hang)

    def _begin(self, n: int, kind: Fault, moment: float) -> None:
        """A fault, and often a second one for the same member shortly afterwards: most defects need two that meet."""
        run, choices = self._run, self._run.world.choices
        available = [member for member in run.members if member.is_available]
        if not available or not choices.allows(f"fault {n}: {kind} at {moment:.3f}"):
            return
        victim = choices.among(available, f"fault {n} victim")
        if choices.unit(f"fault {n} publisher") < 0.15:
            self._break_publisher(f"fault {n} publisher")
        self.strike(kind, f"fault {n}", victim)
        if choices.unit(f"fault {n} pair") < 0.6:
            second = choices.among(run.plan.faults, f"fault {n} second")
            pause = choices.between(0, 1, f"fault {n} second after") ** 2
            name = f"fault {n}: {second} {pause:.3f} s later"

            def follow() -> None:
                if victim.process.runs and choices.allows(name):
                    self.strike(second, f"fault {n} second", victim)

            run.world.after(pause, follow)

    def strike(self, kind: Fault, name: str, victim: Member) -> None:
        """Inflict a fault on a member now."""
        if kind in UNSURE:
            self._run.limits.forget()
        getattr(self, f"_{kind}")(name, victim)

    def _kill(self, name: str, victim: Member) -> None:
        self.excuse(victim, "killed")
        victim.process.kill()
        self._replace(name, victim)

    def _freeze(self, name: str, victim: Member) -> None:
        self.excuse(victim, "frozen")
        victim.process.freeze()
        span = self._run.world.choices.between(0.3, 3 * self._run.plan.lease, f"{name} thawed")
        self._run.world.after(span, victim.process.thaw)

    def _cut(self, name: str, victim: Member) -> None:
        """Most of its connections break, and often no new one can be opened for a while: about the grace, or longer."""
        run, choices = self._run, self._run.world.choices
        self.excuse(victim, "cut off")
        is_lapse = choices.unit(f"{name} lapse") < 0.25
        for connection in run.network.connections_of(victim.process.name):
            if is_lapse and connection.is_reader:  # its leases lapse, and are granted again before the reply comes
                connection.last_in = run.world.now + choices.between(0.8, 2.5, f"{name} {connection.label} late")
            elif is_lapse or choices.unit(f"{name} {connection.label}") < 0.6:
                run.network.break_connection(connection)
        if is_lapse:
            run.network.refuse(victim.process.name, run.world.now + choices.between(0.7, 1.2, f"{name} lapses for"))
        elif choices.unit(f"{name} unreachable") < 0.5:
            low, high = choices.among([(0.7, 1.4), (0.1, 1.5 * run.plan.lease)], f"{name} unreachable how")
            until = run.world.now + choices.between(low, high, f"{name} unreachable for")
            run.network.refuse(victim.process.name, until)

    def _late(self, name: str, victim: Member) -> None:
        """One of its connections, often the reading one, is slow: nothing is lost, but it comes late."""
        run, choices = self._run, self._run.world.choices
        connections = run.network.connections_of(victim.process.name)
        if not connections:
            return
        readers = [connection for connection in connections if connection.is_reader] or connections
        connection = choices.among(
            readers if choices.unit(f"{name} reader") < 0.5 else connections, f"{name} connection"
        )
        self._hold_back(name, victim, connection)

    def _hold_back(self, name: str, victim: Member, connection: SimulatedConnection) -> None:
        """Its commands come late, or the replies."""
        run, choices = self._run, self._run.world.choices
        self.excused[victim.number] = "a command came late"
        lease = run.plan.lease
        low, high = choices.among([(0.05, 1), (0.6 * lease, 1.2 * lease), (1, 8)], f"{name} how late")
        span = choices.between(low, high, f"{name} late")
        until = run.world.now + span
        victim.is_disturbed = victim.is_disturbed or span > 2.5
        if choices.unit(f"{name} replies") < 0.2:
            connection.last_in = max(connection.last_in, until)
            run.world.note(f"replies to {connection.label} are slow until {until:.3f}")
        else:
            connection.held_until = until
            run.world.note(f"{connection.label} is slow until {until:.3f}")

    def _nap(self, name: str, victim: Member) -> None:
        """It stops while a renewal is on its way, for about as long as its lease lasts."""
        run, choices = self._run, self._run.world.choices

        def spring(_: SimulatedConnection) -> None:
            run.world.after(choices.between(0, 0.001, f"{name} nods off"), doze)

        def doze() -> None:
            if victim.is_available and choices.allows(f"{name}: {victim.process.name} naps"):
                self.excuse(victim, "frozen")
                victim.process.freeze()
                span = run.plan.lease * choices.between(0.7, 1.1, f"{name} naps for")
                run.world.after(span, victim.process.thaw)

        run.network.trap(victim.process.name, "renew_lease", spring)

    def _usurp(self, name: str, victim: Member) -> None:
        """A read of it comes late, it is gone meanwhile, and the next owners do not get the reply to their grant."""
        run, choices = self._run, self._run.world.choices

        def spring(connection: SimulatedConnection) -> None:
            if not choices.allows(f"{name}: a read of {victim.process.name} comes late"):
                return
            self.excused[victim.number] = "a command came late"
            victim.is_disturbed = True
            span = run.plan.lease * choices.between(0.5, 2, f"{name} late")
            connection.held_until = run.world.now + span
            run.world.note(f"{connection.label} is slow until {connection.held_until:.3f}")
            run.world.after(choices.between(0, 0.3, f"{name} pause"), follow)

        def follow() -> None:
            then: Fault = choices.among(("kill", "freeze", "cut", "stop"), f"{name} then")
            for other in run.members:
                if other is not victim and other.is_available:
                    skips = choices.among((0, 1, 1), f"{name} {other.number} skips")
                    self.lose(f"{name} {other.number}", other, "take_lease", skips=skips)
            if victim.is_available and choices.allows(f"{name}: {then} after its read"):
                self.strike(then, f"{name} then", victim)

        run.network.trap(victim.process.name, "XREADGROUP", spring)

    def _hold(self, name: str, victim: Member) -> None:
        """A certain command comes late when it is sent next, and often something happens to the member meanwhile."""
        run, choices = self._run, self._run.world.choices
        command = choices.among(self._commands_of(victim), f"{name} command")
        then: Fault = choices.among(("stop", "stop", "kill", "freeze", "cut", "late"), f"{name} then")

        def spring(connection: SimulatedConnection) -> None:
            if not choices.allows(f"{name}: {command} of {victim.process.name} comes late"):
                return
            run.world.note(f"{command} of {victim.process.name} is held back")
            self._hold_back(name, victim, connection)
            run.world.after(choices.between(0, 1, f"{name} pause") ** 2, follow)

        def follow() -> None:
            if choices.unit(f"{name} others") < 0.25:
                for other in run.members:
                    if other is not victim and other.is_available and not other.device:
                        self.lose(f"{name} {other.number}", other, choices.among(TAKING, f"{name} lost"))
            if victim.is_available and choices.allows(f"{name}: {then} after {command}"):
                self.strike(then, f"{name} then", victim)

        run.network.trap(victim.process.name, command, spring)

    def _halt(self) -> None:
        """The simulator stops a worker. What the worker sends last comes late, and it is gone meanwhile."""
        run, choices = self._run, self._run.world.choices
        victim = self._victim("halt")
        if victim is None:
            return
        command = choices.among(LAST_COMMANDS, "halt command")

        def spring(connection: SimulatedConnection) -> None:
            self.excuse(victim, "killed")
            connection.held_until = run.world.now + run.plan.lease * choices.between(0.3, 2, "halt late")
            run.world.note(f"{command} of {victim.process.name} comes at {connection.held_until:.3f}")
            run.world.after(choices.between(0, 0.3, "halt pause"), end)

        def end() -> None:
            if choices.unit("halt sleeps") < 0.5:
                victim.process.kill()
            elif victim.process.runs:
                victim.process.freeze()
                run.world.after(run.plan.lease * choices.between(0.7, 2.5, "halt thawed"), victim.process.thaw)

        run.network.trap(victim.process.name, command, spring)
        self._stop("halt", victim)

    def _hang(self) -> None:
        """Most connections of a worker break, and for about its grace the next ones are neither opened nor refused."""
        run, choices = self._run, self._run.world.choices
        victim = self._victim("hang")
        if victim is None:
            return
        self.excuse(victim, "cut off")
        run.network.hang(victim.process.name, run.world.now + choices.between(0.5, 2, "hang for"))
        for connection in run.network.connections_of(victim.process.name):
            if choices.unit(f"hang {connection.label}") < 0.5:
                run.network.break_connection(connection)

    def _victim(self, name: str) -> Member | None:
        """A worker for a fault that is planned beside the others, if there is one."""
        run, choices = self._run, self._run.world.choices
        available = [member for member in run.members if member.is_available]
        return choices.among(available, f"{name} victim") if available and choices.allows(name) else None

    def _commands_of(self, victim: Member) -> tuple[str, ...]:
        usual = self._usual_commands_of(victim)
        return (*RESIZE_COMMANDS, *usual) if self._run.plan.growth and not victim.device else usual

    def _usual_commands_of(self, victim: Member) -> tuple[str, ...]:
        if victim.device:
            return GATEWAY_COMMANDS if self._run.plan.is_mqtt else DEVICE_COMMANDS
        if self._run.plan.has_outputs or self._run.plan.has_hook or self._run.plan.has_fallback:
            return OUTPUT_COMMANDS
        if self._run.plan.rate[0]:
            return RATE_COMMANDS
        if self._run.plan.group_rate[0]:
            return GROUP_RATE_COMMANDS
        if self._run.plan.linger:
            return DIGEST_COMMANDS
        if self._run.plan.has_quiet:
            return QUIET_COMMANDS
        if self._run.plan.is_hot or self._run.plan.has_tenants:
            return HOT_COMMANDS
        return FEED_COMMANDS if self._run.plan.is_inbox else COMMANDS

    def _drop(self, name: str, victim: Member) -> None:
        """A certain command or its reply is lost with the connection when it is sent next."""
        command = self._run.world.choices.among(self._commands_of(victim), f"{name} command")
        self.lose(name, victim, command)

    def lose(self, name: str, victim: Member, command: str, skips: int = 0) -> None:
        """A command or its reply is lost with the connection when it is sent next, or after that."""
        run, choices = self._run, self._run.world.choices

        def spring(connection: SimulatedConnection) -> None:
            if not choices.allows(f"{name}: {command} of {victim.process.name} or its reply is lost"):
                return
            self.excuse(victim, "cut off")
            self._lose_now(name, connection)

        run.network.trap(victim.process.name, command, spring, skips=skips)

    def _lose_now(self, name: str, connection: SimulatedConnection) -> None:
        if self._run.world.choices.unit(f"{name} before") < 0.3:
            self._run.network.break_connection(connection)
        else:
            self._run.world.note(f"the reply to what {connection.label} sends now will be lost")
            connection.breaks_after = connection.chunks

    def _break_publisher(self, name: str) -> None:
        """Its connections break, now or with the next write: it finds out what was stored, and stores nothing twice."""
        network, choices = self._run.network, self._run.world.choices
        if choices.unit(f"{name} now") < 0.3:
            for connection in network.connections_of("p"):
                network.break_connection(connection)
        else:
            network.trap("p", "XADD", lambda connection: self._lose_now(f"{name} p", connection))

    def _stop(self, name: str, victim: Member) -> None:
        """A planned stop, as SIGTERM does it."""
        self._run.world.note(f"the simulator stops m{victim.number}")
        victim.is_stopping = True
        if victim.device:  # it is taken over
            self._run.replace(victim)
            return
        victim.process.loop.call_soon(victim.broker.stop)
        self._replace(name, victim)

    def _cancel(self, name: str, victim: Member) -> None:
        """The task that runs the worker is cancelled, as in a service that ends."""
        self._run.world.note(f"m{victim.number} is cancelled")
        self.excuse(victim, "cancelled")
        victim.is_stopping = True
        assert victim.process.main is not None
        victim.process.loop.call_soon(victim.process.main.cancel)
        self._replace(name, victim)

    def _replace(self, name: str, victim: Member) -> None:
        pause = self._run.world.choices.between(0.1, 3, f"{name} replaced")
        self._run.world.after(pause, lambda: self._start(name, victim))

    def _start(self, name: str, victim: Member) -> None:
        """Start its replacement, which sometimes has to stop at once."""
        choices = self._run.world.choices
        started = self._run.replace(victim)
        if not started.device and choices.unit(f"{name} stopped") < 0.1:
            pause = choices.between(0, 0.02, f"{name} stopped after")
            self._run.world.after(pause, lambda: started.is_available and self._stop(f"{name} again", started))

    def excuse(self, victim: Member, why: str) -> None:
        """It may handle messages twice because of this."""
        self.excused[victim.number] = why
        victim.is_disturbed = True

    def _note_slow(self, label: str, span: float) -> None:
        """Slow answers may add up to more than a lease leaves for them. Then it ends, although no fault has struck."""
        run = self._run
        victim = next((each for each in run.members if each.process.name == label.split("#")[0]), None)
        if victim is None:
            return
        settings, now = victim.broker.settings, run.world.now
        believed = (settings.lease_ttl - lease_margin(settings)).total_seconds()
        recent = [(at, each) for at, each in self._slow[label] if at > now - believed] + [(now, span)]
        self._slow[label] = recent
        if sum(each for _, each in recent) > believed - heartbeat_interval(settings).total_seconds():
            run.world.note(f"the heartbeat of {victim.process.name} is too slow for its lease")
            self.excuse(victim, "slow heartbeats")

    # -- what happens to the server -----------------------------------------------------------------------------------

    def _restart(self, name: str, _: Member) -> None:
        """It is away for a while, and forgets its scripts; it loses nothing else."""
        self._excuse_all("the server was away")
        self._leave(self._run.world.choices.between(0.01, 1.5 * self._run.plan.lease, f"{name} away"))

    def _leave(self, span: float) -> None:
        run = self._run
        run.network.replaced += 1
        run.network.refuse("", run.world.now + span)
        for connection in run.network.connections():
            run.network.break_connection(connection)
        run.network.ask("SCRIPT", "FLUSH")

    def _failover(self, name: str, _: Member) -> None:
        """A replica takes over that lacks the last writes. It is the same server, with what it had stored before."""
        run, choices, since = self._run, self._run.world.choices, self._run.world.now
        run.network.ask("SAVE")

        def take_over() -> None:
            self._excuse_all("the server lost its last writes")
            self._leave(choices.between(0.01, run.plan.lease, f"{name} away"))
            run.world.note(f"the server loses what was written since {since:.3f}")
            run.network.ask("DEBUG", "RELOAD", "NOSAVE")
            run.forget(since)
            self._set_clock(choices.among([0.0, 0.0, 0.0, -20.0, -2.0, 2.0], f"{name} offset"))

        run.world.after(choices.between(0, 1, f"{name} later") ** 2, take_over)

    def _wipe(self, _: str, __: Member) -> None:
        """FLUSHALL: the server has nothing any more."""
        self._excuse_all("the server lost everything")
        self._run.world.note("the server loses everything")
        self._run.network.ask("FLUSHALL")
        self._run.was_wiped = True
        self._run.wiped_at = self._run.world.now
        self._run.forget(0.0)

    def _flush(self, _: str, __: Member) -> None:
        """The scripts of the server are removed."""
        self._run.world.note("the server forgets its scripts")
        self._run.network.ask("SCRIPT", "FLUSH")

    def _step(self, name: str, _: Member) -> None:
        """Its clock is set."""
        offset = self._run.world.choices.among([-3600.0, -20.0, -2.0, 0.0, 2.0, 20.0], f"{name} offset")
        if self._run.plan.distribution == "shared":
            offset = max(offset, -20.0)  # abandoned messages are found by how long they are idle, by that clock
        if self._run.plan.has_quiet:
            offset = max(offset, -20.0)  # the rule names a time of that clock: it is as much later
        self.step(offset)

    def step(self, offset: float) -> None:
        """Set its clock."""
        self._excuse_all("the clock was set")
        self._set_clock(offset)

    def _set_clock(self, offset: float) -> None:
        """Not where messages are due, expire, or have started at a time of that clock: that moves by as much.

        Not back when a lease was deleted: see `_unlease`.
        """
        run = self._run
        plan = run.plan
        is_due = plan.delayed or plan.schedule or plan.expires or plan.rate[0] or plan.group_rate[0] or plan.uniques
        if is_due or (self._was_unleased and offset < run.network.offset):
            return
        if offset > run.network.offset:
            self._end_leases()
            run.skip_time()
        self._was_set_back = self._was_set_back or offset < run.network.offset
        run.network.offset = offset
        run.moves.forget()
        run.quiet.forget()
        run.digests.forget()
        run.world.note(f"the server's clock is off by {run.network.offset:g} s")

    def _end_leases(self) -> None:
        """Leases end on the server before their owners have found out."""
        self._run.unsure_until = self._run.world.now + self._run.plan.lease

    def _unlease(self, name: str, _: Member) -> None:
        """The record of a lease is deleted.

        Not when the clock is set back, too: the record has the time from which retries are seen to wait for too long.
        Nor while a command is late, which may be a read: the record names its connection, for the next owner to end.
        """
        run = self._run
        if self._was_set_back or run.network.is_a_command_late:
            return
        partition = int(run.world.choices.between(0, run.plan.partitions, f"{name} partition"))
        self._excuse_all("a lease was deleted")
        self._was_unleased = True
        run.world.note(f"the lease of partition {partition} is deleted")
        run.network.ask("DEL", run.lease_key(partition))

    def _reset(self, _: str, __: Member) -> None:
        """The group is reset to the start, as `rsmq group reset` does it."""
        run, keys = self._run, self._run.members[0].broker.keys
        self._excuse_all("the group was reset")
        self._end_leases()
        run.was_reset = True
        run.digests.forget()
        run.moves.forget()
        parts = (keys.lease, keys.retry, keys.cancels, keys.cancelled, keys.waits, keys.calls)
        every = [
            [keys.stream(TOPIC, partition), *[part(TOPIC, partition, GROUP) for part in parts]]
            for partition in run.numbers
        ]
        if run.plan.growth and run.layout.is_resized:
            every = [[name for names in every for name in names]]
        for names in every:
            run.network.inflict("EVAL", RESET_GROUP.source, len(names), *names, GROUP, "0")
        run.network.inflict("HDEL", keys.group(TOPIC, GROUP), "distribution")
        run.network.inflict("PUBLISH", keys.changes(TOPIC, GROUP), "")

    def _unconsume(self, _: str, victim: Member) -> None:
        """Its consumers are deleted, with the list of what it has in flight."""
        keys = self._run.members[0].broker.keys
        for partition in self._run.numbers:
            stream = keys.stream(TOPIC, partition)
            self._run.network.inflict("XGROUP", "DELCONSUMER", stream, GROUP, victim.process.name)
        self._run.last_until(self._run.world.now + AUDITED_AFTER)

    def _excuse_all(self, why: str) -> None:
        for member in self._run.members:
            self.excused.setdefault(member.number, why)
            member.is_disturbed = True
