"""All members that watch the others of a large group go at once: they die, are paused, or see half of the group each.

The others must find out by themselves. How long that may take is what `GroupWatch` says: the proof of the last look
ends, a heartbeat later a member finds none, once more after a pause, and gives the silent ones their grace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rsmq.heartbeat import group_watch
from rsmq.heartbeat.membership import LOOKS_PROVED, STAND_IN_PAUSE
from rsmq.model.settings import heartbeat_interval
from tests.simulation.plan import GROUP, TOPIC

if TYPE_CHECKING:
    from tests.simulation.network import SimulatedConnection
    from tests.simulation.run import Member, Run

LOOKS: Final = 4
"""Of a member at the silent ones, beside their grace: by the one that stands in, and by those that hear of it."""
SLACK: Final = 1.5
"""Seconds for answers that are slow, and for the lease to be taken."""


class Unwatched:
    """Plans when all watchers go, and checks that their partitions are taken over in time."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def _bound(self) -> float:
        """Seconds until the members that are left must have taken the partitions of those that have died."""
        settings = self._run.settings()
        look, grace = settings.presence_interval.total_seconds(), settings.presence_grace.total_seconds()
        found = LOOKS_PROVED * look + heartbeat_interval(settings).total_seconds() + STAND_IN_PAUSE
        return found + grace + LOOKS * look + SLACK

    def plan(self) -> None:
        """Put it on the agenda: once, when the group is complete."""
        choices = self._run.world.choices
        moment = choices.between(2.0, self._run.plan.seconds / 2, "watchers go")
        self._run.world.at(moment, self._begin)

    def _begin(self) -> None:
        run, choices, kind = self._run, self._run.world.choices, self._run.plan.unwatched
        alive = {each.process.name: each for each in run.members if each.is_available}
        watchers = [alive[name] for name in sorted(group_watch.watchers_of(alive, f"{TOPIC}/{GROUP}"))]
        others = [each for each in alive.values() if each not in watchers]
        if not watchers or len(others) < 2 or not choices.allows(f"all watchers: {kind}"):
            return
        run.world.note(f"all watchers go: {kind} {[each.process.name for each in watchers]}")
        getattr(self, f"_{kind}")(watchers, others)

    def _dead(self, dead: list[Member]) -> None:
        """Kill them. Others come when the check is done."""
        run = self._run
        for each in dead:
            run.fates.excuse(each, "killed")
            each.process.kill()
        run.last_until(run.world.now + self._bound + 1)
        run.world.after(self._bound, lambda: self._check(dead))

    def _check(self, dead: list[Member]) -> None:
        """None of the others counts on the dead ones, whose leases last longer than this, or leaves them a partition.

        A partition may be left to them where members sleep: it may be meant for one of these.
        """
        run, gone = self._run, {each.process.name for each in dead}
        when = f"{self._bound:.1f} s after the watchers went"
        for member in run.members:
            worker = member.broker.worker if member.is_available else None
            for consumer in worker.consumers if worker is not None else ():
                if found := gone.intersection(consumer.membership.live) - consumer.membership.absent:
                    run.violate(f"{member.process.name} counts on {', '.join(sorted(found))} {when}")
        is_asleep = any(each.process.is_frozen for each in run.members)
        for partition in () if is_asleep else run.numbers:
            owner = run.network.ask("HGET", run.lease_key(partition), "owner") or b""
            if owner.decode() in gone:
                run.violate(f"partition {partition} is {owner.decode()}'s {when}")
        for each in dead:
            run.replace(each)

    def _die(self, watchers: list[Member], others: list[Member]) -> None:
        """They die together, sometimes with one more."""
        more = others[:1] if len(others) > 2 and self._run.world.choices.unit("one more dies") < 0.5 else []
        self._dead(watchers + more)

    def _sleep(self, watchers: list[Member], others: list[Member]) -> None:
        """They are paused, and another member dies. They wake up later than their leases last, or before that."""
        run = self._run
        for each in watchers:
            run.fates.excuse(each, "frozen")
            each.process.freeze()
        span = self._bound + run.world.choices.between(0.5, 8, "watchers wake up")
        for each in watchers:
            run.world.after(span, each.process.thaw)
        run.last_until(run.world.now + span + 1)
        self._dead(others[:1])

    def _split(self, watchers: list[Member], others: list[Member]) -> None:
        """One watcher after the other finds another half of the group silent for a moment, and tells the others."""
        run, choices = self._run, self._run.world.choices
        alive = watchers + others
        for number, watcher in enumerate(watchers):
            half = [each for each in alive if each is not watcher][number % 2 :: 2]

            def spring(_: SimulatedConnection, half: list[Member] = half) -> None:
                for each in half:
                    for connection in run.network.connections_of(each.process.name):
                        if connection.is_listener:
                            run.network.break_connection(connection)

            run.network.trap(watcher.process.name, "PUBSUB", spring, skips=choices.among((0, 1, 2), f"half {number}"))
        for each in alive:
            run.fates.excuse(each, "cut off")
