"""Whether a worker makes progress: facts in, a verdict with its reasons out. No I/O.

Live: this process can work, so that a restart would not help. A server that is away is no reason to restart anybody.
Ready: it works now, with the server it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from rsmq.settings import Settings
from rsmq.telemetry.pulse import LATE, Block

Probe = Literal["live", "ready"]
READ_MARGIN: Final = 5.0
"""Seconds beyond the longest read before a read loop counts as silent: its own time-out is within them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was seen. Ages in seconds; None: there is none (yet). `turned` and `read` are of the slowest reader of each
    handler: its last turn, and its last turn without an error."""

    member: str = ""
    is_serving: bool = False
    is_stopping: bool = False
    loop_late: float = 0.0
    block: Block | None = None
    beat_age: float | None = None
    beat_is_alive: bool = True
    turned: Mapping[str, float] = field(default_factory=dict)
    read: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """From when on an age is too much, in seconds."""

    stall: float
    turn: float
    read: float
    beat: float

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        """Those that follow from the settings. A turn may wait out a server that is away."""
        read = settings.longest_read.total_seconds() + READ_MARGIN
        stall = settings.stall_limit.total_seconds()
        return cls(
            stall=stall,
            turn=max(stall, settings.unavailable_timeout.total_seconds() + settings.connect_timeout.total_seconds())
            + read,
            read=read,
            beat=settings.lease_ttl.total_seconds(),
        )


def troubles(facts: Facts, limits: Limits, probe: Probe) -> list[str]:
    """What speaks against it, a line each; nothing: all is well."""
    return list(_against_life(facts, limits) if probe == "live" else _against_work(facts, limits))


def _against_life(facts: Facts, limits: Limits) -> Iterator[str]:
    if facts.loop_late >= limits.stall:
        yield f"the event loop is blocked for {facts.loop_late:.0f} s{_by(facts)}, allowed are {limits.stall:.0f}"
    if not facts.beat_is_alive:
        yield "the heartbeat's thread has ended"
    if facts.is_serving:
        for handler, age in facts.turned.items():
            if age >= limits.turn:
                yield f"the read loop of {handler} has not turned for {age:.0f} s, allowed are {limits.turn:.0f}"


def _against_work(facts: Facts, limits: Limits) -> Iterator[str]:
    if facts.is_stopping:
        yield "it is stopping"
    elif not facts.is_serving:
        yield "it is not serving yet"
    if facts.loop_late >= LATE:
        yield f"the event loop is blocked for {facts.loop_late:.1f} s{_by(facts)}"
    if facts.beat_age is not None and facts.beat_age >= limits.beat:
        yield f"no heartbeat has landed for {facts.beat_age:.1f} s, allowed are {limits.beat:.1f}"
    for handler, age in facts.read.items():
        if age >= limits.read and facts.loop_late < LATE:
            yield f"no read of {handler} has succeeded for {age:.1f} s, allowed are {limits.read:.1f}"


def _by(facts: Facts) -> str:
    return f" by {facts.block.culprit}" if facts.block is not None else ""


def report(facts: Facts, limits: Limits, probe: Probe) -> dict[str, Any]:
    """The answer of a probe, for people and machines. No payload is in it."""
    against = troubles(facts, limits, probe)
    block = facts.block
    return {
        "status": "failing" if against else "ok",
        "troubles": against,
        "member": facts.member,
        "is_serving": facts.is_serving,
        "is_stopping": facts.is_stopping,
        "loop": {"late_seconds": round(facts.loop_late, 3)},
        "heartbeat": {"age_seconds": None if facts.beat_age is None else round(facts.beat_age, 3)},
        "reading": {
            handler: {"turned_seconds": round(age, 3), "read_seconds": round(facts.read[handler], 3)}
            for handler, age in facts.turned.items()
        },
        "blocked": block
        and {"seconds": round(block.seconds, 1), "by": block.culprit, "stack": "".join(block.stack).splitlines()},
    }
