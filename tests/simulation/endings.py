"""Other ends of a message: it expires, it is buried with what `on_dead` publishes, or goes to a fallback topic."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

import anyio

from rsmq import Burial, Message
from rsmq.handler.fallback import REASONS
from rsmq.model.reason import Reason
from tests.chaos.checker import Name
from tests.chaos.ledger import Event
from tests.simulation.plan import GROUP, TOPIC
from tests.simulation.world import EPOCH

if TYPE_CHECKING:
    from rsmq.consumer.waiting.lane import Lane
    from tests.simulation.run import Member, Run

BURIED: Final = "buried"
FALLBACK: Final = "fallback"
LONGEST: Final = 3.0
"""Seconds that a message may be handled; most have much less."""
SLOWEST: Final = 0.9
"""Seconds that a reply takes at most without a fault: so much too late a message may start."""


class Expiries(logging.Handler):
    """Which messages expire, when, and what became of them. It reads in the log what a worker has dropped.

    By the server's clock, which is not set in seeds with an expiry: no handler starts later than the worker can know,
    nothing is dropped or buried before, and each message ends in one way.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(logging.DEBUG)
        self._run = run
        self._spans, self._moments = dict[Name, float](), dict[Name, list[float]]()
        self._ends_dead, self.dropped = set[Name](), set[Name]()
        self.dead = Counter[Name]()

    def options(self, name: Name, delay: timedelta | None) -> dict[str, Any]:
        """What a message is published with."""
        choices, plan = self._run.world.choices, self._run.plan
        if choices.unit(f"expires {name}") >= plan.expires:
            return {}
        # the wire format has milliseconds
        span = round(0.002 + LONGEST * choices.unit(f"expires {name} after") ** 2, 3)
        if delay is not None:  # its publisher turns it into a moment, by a clock that is behind by a reply at most
            span += round(delay.total_seconds(), 3)
            self._moments[name] = [self._run.world.now + span - SLOWEST, float("inf")]
        self._spans[name] = span
        options: dict[str, Any] = {"expires": timedelta(seconds=span)}
        if choices.unit(f"expires {name} dead") < 0.5:
            self._ends_dead.add(name)
            options["on_expiry"] = "dead"
        return options

    def published(self, name: Name) -> None:
        """Its publish is over: a moment that was computed is not later than that."""
        if name in self._moments:
            self._moments[name][1] = self._run.world.now + self._spans[name]

    def _bounds(self, name: Name, message: Message) -> tuple[float, float]:
        """Between which moments it expires."""
        if name in self._moments:
            return self._moments[name][0], self._moments[name][1]
        at = int(message.stream_id.split("-")[0]) / 1000 - EPOCH + self._spans[name]
        return at, at

    def starts(self, member: Member, message: Message) -> None:
        """A handler starts: the message has not expired, as far as its worker can know."""
        name, world = self._run.name_in(message), self._run.world
        if name not in self._spans:
            return
        late = world.now - self._bounds(name, message)[1]
        # a worker that a fault has struck may have had its last look long ago: then it goes by that
        lag = SLOWEST
        if member.number in self._run.fates.excused:
            assert member.broker.worker is not None
            clock = member.broker.worker.consumers[0].membership.clock
            lag = world.now + EPOCH - clock.now_ms() / 1000 + 0.002
        if late > lag:
            self._run.violate(f"{name} starts in m{member.number} {late:.3f} s after its expiry")

    def emit(self, record: logging.LogRecord) -> None:
        """A worker finds a message expired."""
        if not str(record.msg).startswith("%s: expired, ") or not isinstance(record.args, tuple):
            return
        message: Any = record.args[1]
        name, world = self._run.name_in(message), self._run.world
        is_dead = "dead letters" in str(record.msg)
        if name not in self._spans or is_dead != (name in self._ends_dead):
            self._run.violate(f"{name} expires in a way that it was not published with")
        elif world.now + 0.002 < self._bounds(name, message)[0]:
            self._run.violate(f"{name} expires {self._bounds(name, message)[0] - world.now:.3f} s too early")
        if not is_dead:
            self.dropped.add(name)

    def sort(self, dead: Iterable[tuple[Name, str]]) -> list[tuple[Name, str]]:
        """Take note of the dead letters that have expired, and leave the others."""
        dead = list(dead)
        self.dead = Counter(name for name, reason in dead if reason == Reason.EXPIRED)
        return [(name, reason) for name, reason in dead if reason != Reason.EXPIRED]

    @property
    def ended(self) -> set[Name]:
        """Those that have expired."""
        return self.dropped | self.dead.keys()

    def wrong(self, events: Iterable[Event], others: Iterable[Name], cancelled: Iterable[Name]) -> list[str]:
        """Messages that have expired and ended otherwise, too. A worker that was struck may have handled one, or found
        it expired, and not settled it. `others`: dead for another reason."""
        if self._run.was_reset or not self._run.plan.expires:
            return []
        strange = self._run.fates.excused
        handled = {(each.key, each.n) for each in events if each.what == "commit" and each.pid not in strange}
        sure = self.ended if len(strange) < len(self._run.members) else set(self.dead)
        return [
            *[f"{name} has expired and was handled" for name in sorted(sure & handled)],
            *[f"{name} has expired and is another dead letter" for name in sorted(self.dead.keys() & set(others))],
            *[f"{name} has expired and was cancelled" for name in sorted(self.dead.keys() & set(cancelled))],
            *[
                f"{name} has expired {count} times"
                for name, count in sorted(self.dead.items())
                if count > 1 and not self._run.is_perhaps_twice(name)
            ],
            *[f"{name} is dead, but should be dropped" for name in sorted(self.dead.keys() - self._ends_dead)],
        ]


class Burials:
    """What `on_dead` has published: once for each dead letter, and for nothing else."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def register(self, member: Member, topic: str, group: str) -> None:
        """Give the handler of a member its `on_dead`."""
        choices, counts = self._run.world.choices, Counter[Name]()

        async def bury(message: Message, burial: Burial) -> None:
            name = self._run.name_in(message)
            counts[name] += 1
            self._run.world.note(f"   on_dead of {name} in m{member.number}: {burial.reason}")
            await message.publish(BURIED, {"key": name[0], "n": name[1]}, key=name[0])
            await anyio.sleep(choices.between(0, 0.3, f"on_dead: m{member.number} {name} {counts[name]}"))
            if self._fails(name):
                raise RuntimeError("no output")

        member.broker.on_dead(topic, group=group)(bury)

    def _fails(self, name: Name) -> bool:
        return self._run.world.choices.unit(f"on_dead {name} fails") < 0.15

    def wrong(self, dead: Iterable[Name], stored: Counter[Name]) -> list[str]:
        """`stored`: how many outputs of each message there are."""
        if not self._run.plan.has_hook or self._run.was_reset:
            return []
        letters = Counter(dead)
        return [
            f"{stored[name]} outputs of on_dead for {name[0]}/{name[1]}, not {wanted}"
            for name in sorted(letters.keys() | stored.keys())
            if stored[name] != (wanted := 0 if self._fails(name) else letters[name])
        ]


class HandedOn:
    """What went to the fallback topic: it ends as a dead letter would, and is none. Each has a record of its own. The
    next message of its key starts when the server knows of that: otherwise a kill would turn them round."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rejected = dict[tuple[str, str], tuple[Name, str]]()  # of each stream and key the last one, and its id

    def rejects(self, name: Name, message: Message) -> None:
        """A handler has failed for good, and a message with a key goes to the fallback topic."""
        plan, origin = self._run.plan, cast("Lane", message.origin)
        if plan.has_fallback and plan.ordering != "none" and not plan.batch:
            self._rejected[origin.stream, name[0]] = name, message.stream_id

    def starts(self, name: Name, message: Message) -> None:
        """A handler is called with a message: an earlier one, of its band and key, is not pending any more."""
        stream = cast("Lane", message.origin).stream
        rejected, entry_id = self._rejected.pop((stream, name[0]), (name, ""))
        if name <= rejected or self._run.has_lost_writes:
            return
        if self._run.network.ask("XPENDING", stream, GROUP, entry_id, entry_id, 1):
            self._run.violate(f"{name} starts before {rejected} has gone to the fallback topic")

    def read(self) -> list[tuple[Name, str]]:
        """The messages of the fallback topic, and why they are there."""
        if not self._run.plan.has_fallback:
            return []
        return [(name, headers["fallback.reason"]) for name, headers, _ in self._stored()]

    def _stored(self) -> Iterator[tuple[Name, dict[str, str], str]]:
        keys = self._run.members[0].broker.keys
        for partition in self._run.numbers:
            for _, flat in self._run.network.ask("XRANGE", keys.stream(FALLBACK, partition), "-", "+"):
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                order = self._run.encoded.order(fields)
                yield (order["key"], order["n"]), json.loads(fields[b"h"]), fields[b"id"].decode()

    def wrong(self, letters: Iterable[tuple[Name, str]]) -> list[str]:
        """`letters`: the dead letters of the group."""
        if not self._run.plan.has_fallback:
            return []
        keys, records = self._run.members[0].broker.keys, Counter[str]()
        for partition in self._run.numbers:
            for _, flat in self._run.network.ask("XRANGE", keys.handed_on(TOPIC, partition, GROUP), "-", "+"):
                records[dict(zip(flat[::2], flat[1::2], strict=True))[b"to"].decode()] += 1
        stored = Counter(identity for _, _, identity in self._stored())
        return [
            *[f"{name} is a dead letter ({why}) beside a fallback" for name, why in letters if why in REASONS],
            *[f"{name} went to the fallback topic by {why}" for name, why in self.read() if why not in REASONS],
            *([] if stored == records else [f"messages of the fallback topic {stored}, and records {records}"]),
        ]
