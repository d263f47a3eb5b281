"""Whether a worker makes progress: the probes /livez and /readyz.

Live: a restart would not help. An unreachable server is no reason to restart a worker.
Ready: the worker serves now, and reaches its server.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final, Literal

from rsmq.broker import Broker
from rsmq.consumer.consumer import Consumer
from rsmq.consumer.running.task_slot import TaskSlot
from rsmq.handler.failure import describe
from rsmq.model.clock import awake, monotonic
from rsmq.model.settings import Settings, longest_read
from rsmq.telemetry.loop_monitor import LATE, LoopBlock, LoopMonitor

Probe = Literal["live", "ready"]
READ_MARGIN: Final = 5.0
"""Seconds beyond the longest read before a read loop counts as silent: its own timeout is within them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeInput:
    """The facts that the probes judge. Ages are in seconds, None if there was none yet.

    `heartbeat_trouble` says why the last renewal failed, `absent_for` for how long the other members have not seen this
    one, and `refused` what the server has answered for a lease instead of doing it. `turned` and `read` are the ages of
    the last turn of each handler's slowest read loop, and of its last turn without an error. `broken` says why a
    handler's pool cannot go on, and `unclaimed` how long the first ready message of a handler has waited although a
    task was free. `apart` says why a handler takes no part in its group, and `unreadable` which partitions
    of a cluster it cannot read and why. Busy tasks are no trouble, however long their
    handlers run.
    """

    member: str = ""
    is_serving: bool = False
    is_stopping: bool = False
    loop_late: float = 0.0
    block: LoopBlock | None = None
    heartbeat_age: float | None = None
    heartbeat_is_alive: bool = True
    heartbeat_trouble: str = ""
    absent_for: float = 0.0
    refused: Sequence[str] = ()
    turned: Mapping[str, float] = field(default_factory=dict)
    read: Mapping[str, float] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    unclaimed: Mapping[str, float] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """The age in seconds from which a probe fails."""

    stall: float
    turn: float
    read: float
    heartbeat: float

    @classmethod
    def of(cls, settings: Settings) -> HealthLimits:
        """The limits of these settings. A turn may last as long as a worker waits for an unreachable server."""
        read = longest_read(settings).total_seconds() + READ_MARGIN
        stall = settings.stall_limit.total_seconds()
        return cls(
            stall=stall,
            turn=max(stall, settings.unavailable_timeout.total_seconds() + settings.connect_timeout.total_seconds())
            + read,
            read=read,
            heartbeat=settings.lease_ttl.total_seconds(),
        )


def troubles(seen: ProbeInput, limits: HealthLimits, probe: Probe) -> list[str]:
    """The reasons why the probe fails, a line each; empty if it passes."""
    return list(_not_live(seen, limits) if probe == "live" else _not_ready(seen, limits))


def _not_live(seen: ProbeInput, limits: HealthLimits) -> Iterator[str]:
    if seen.failure is not None:
        yield f"the worker has ended: {seen.failure}"
    if seen.loop_late >= limits.stall:
        yield f"the event loop has been blocked for {seen.loop_late:.0f} s{_by(seen)}, the limit is {limits.stall:.0f}"
    if not seen.heartbeat_is_alive:
        yield "the heartbeat thread has ended"
    if seen.is_serving:
        for handler, age in seen.turned.items():
            if age >= limits.turn:
                yield f"the read loop of {handler} has not turned for {age:.0f} s, the limit is {limits.turn:.0f}"
        yield from _not_handling(seen, limits)


def _not_handling(seen: ProbeInput, limits: HealthLimits) -> Iterator[str]:
    for handler, trouble in seen.broken.items():
        yield f"{handler} cannot go on: {trouble}"
    for handler, age in seen.unclaimed.items():
        if age >= limits.stall:
            yield f"a message of {handler} is ready for {age:.0f} s, and no free task takes it"


def _not_ready(seen: ProbeInput, limits: HealthLimits) -> Iterator[str]:
    if seen.is_stopping:
        yield "the worker is stopping"
    elif not seen.is_serving:
        yield "the worker is not serving yet"
    for handler, trouble in seen.apart.items():
        yield f"{handler} takes no part in its group: {trouble}"
    for handler, trouble in seen.unreadable.items():
        yield f"{handler} leaves partitions to other members: {trouble}"
    if seen.loop_late >= LATE:
        yield f"the event loop has been blocked for {seen.loop_late:.1f} s{_by(seen)}"
    if seen.heartbeat_age is not None and seen.heartbeat_age >= limits.heartbeat:
        why = f": {seen.heartbeat_trouble}" if seen.heartbeat_trouble else ""
        yield f"no heartbeat was confirmed for {seen.heartbeat_age:.1f} s, the limit is {limits.heartbeat:.1f}{why}"
    if seen.absent_for >= limits.heartbeat:
        yield f"other members count this one as dead: no presence connection for {seen.absent_for:.1f} s"
    for handler, age in seen.read.items():
        if age >= limits.read and seen.loop_late < LATE:
            yield f"no read of {handler} has succeeded for {age:.1f} s, the limit is {limits.read:.1f}"
    yield from seen.refused
    if seen.is_serving:
        yield from _not_handling(seen, limits)


def _by(seen: ProbeInput) -> str:
    return f" by {seen.block.culprit}" if seen.block is not None else ""


def report(seen: ProbeInput, limits: HealthLimits, probe: Probe) -> dict[str, Any]:
    """The answer of a probe as JSON. It contains no payload."""
    found = troubles(seen, limits, probe)
    block = seen.block
    return {
        "status": "failing" if found else "ok",
        "troubles": found,
        "member": seen.member,
        "is_serving": seen.is_serving,
        "is_stopping": seen.is_stopping,
        "loop": {"late_seconds": round(seen.loop_late, 3)},
        "heartbeat": {"age_seconds": None if seen.heartbeat_age is None else round(seen.heartbeat_age, 3)},
        "reading": {
            handler: {"turned_seconds": round(age, 3), "read_seconds": round(seen.read[handler], 3)}
            for handler, age in seen.turned.items()
        },
        "blocked": block
        and {"seconds": round(block.seconds, 1), "by": block.culprit, "stack": "".join(block.stack).splitlines()},
    }


class WorkerProbe:
    """Gathers the input of the probes from a broker's worker, from any thread."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.loop_monitor = LoopMonitor(self._blame, self._look)
        self._unclaimed: dict[str, tuple[object, float]] = {}

    def read(self) -> ProbeInput:
        """The state now. Without a worker: neither serving nor stopping."""
        worker, block = self._broker.worker, self.loop_monitor.block()
        late = self.loop_monitor.late if block is None else block.seconds
        if worker is None:
            failure = self._broker.failure
            return ProbeInput(loop_late=late, block=block, failure=None if failure is None else describe(failure))
        heartbeat, now = worker.heartbeat, awake()
        fetchers = {repr(each.handler): each.fetchers.active for each in worker.consumers if each.fetchers.active}
        pools = {repr(each.handler): each.pool.trouble for each in worker.consumers}
        return ProbeInput(
            member=worker.member,
            is_serving=worker.is_serving,
            is_stopping=worker.is_stopping,
            loop_late=late,
            block=block,
            heartbeat_age=None if heartbeat is None else monotonic() - heartbeat.last_confirmed,
            heartbeat_is_alive=heartbeat is None or heartbeat.is_alive or worker.is_stopping,
            heartbeat_trouble="" if heartbeat is None else heartbeat.trouble,
            absent_for=0.0 if heartbeat is None else heartbeat.absent_for,
            refused=worker.refused(),
            turned={name: now - min(each.last_turn for each in some) for name, some in fetchers.items()},
            read={name: now - min(each.last_success for each in some) for name, some in fetchers.items()},
            broken={name: why for name, why in pools.items() if why is not None},
            apart={repr(each.handler): why for each in worker.consumers if (why := each.participation.trouble)},
            unreadable={repr(each.handler): why for each in worker.consumers if (why := each.participation.unreadable)},
            unclaimed={name: monotonic() - since for name, (_, since) in self._unclaimed.items()},
        )

    def _look(self) -> None:
        """Note since when the first ready message of a handler waits for a task that is free."""
        worker, seen = self._broker.worker, self._unclaimed
        found: dict[str, tuple[object, float]] = {}
        if worker is not None and self.loop_monitor.late < LATE:  # a loop that is blocked is a reason of its own
            for consumer in tuple(worker.consumers):
                name, head = repr(consumer.handler), consumer.pool.unclaimed
                if head is not None:
                    found[name] = seen[name] if name in seen and seen[name][0] is head else (head, monotonic())
        self._unclaimed = found

    def _blame(self, task: asyncio.Task[object] | None, frames: list[FrameType]) -> str:
        """The handler whose task the loop is in, else the one whose code is on the stack."""
        codes = {frame.f_code for frame in frames}
        for consumer, task_slot in self._task_slots():
            if task_slot.task is task and task is not None:
                return describe_culprit(consumer, task_slot)
        for consumer, _ in self._task_slots():
            if getattr(inspect.unwrap(consumer.handler.function), "__code__", None) in codes:
                return repr(consumer.handler)
        return "code that is not a handler" if task is None else f"the task {task.get_name()}, which is not a handler's"

    def _task_slots(self) -> Iterator[tuple[Consumer, TaskSlot]]:
        worker = self._broker.worker
        for consumer in worker.consumers if worker is not None else ():
            for task_slot in consumer.task_slots:
                if task_slot.messages:
                    yield consumer, task_slot


def describe_culprit(consumer: Consumer, task_slot: TaskSlot) -> str:
    """A running call: its handler, its message, for how long. Without key and payload."""
    messages = task_slot.messages
    first, more = next(iter(messages)), f" and {len(messages) - 1} more" if len(messages) > 1 else ""
    return (
        f"{consumer.handler!r} with message {first.id} of {first.topic}.{first.partition}, attempt {first.attempt}"
        f"{more}, running for {monotonic() - task_slot.started:.1f} s"
    )
