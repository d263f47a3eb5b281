"""Watching a broker's worker: what a probe has to know, gathered from the roles; and who blocks their loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from types import FrameType

from rsmq.broker import Broker
from rsmq.clock import monotonic
from rsmq.consumer.consumer import Consumer
from rsmq.consumer.pool import Slot
from rsmq.telemetry.health import Facts
from rsmq.telemetry.pulse import Pulse


class Watch:
    """Looks at a broker's worker from any thread."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.pulse = Pulse(self._blame)

    def facts(self) -> Facts:
        """How it stands now. Without a worker: neither serving nor stopping."""
        worker, block = self._broker.worker, self.pulse.look()
        late = self.pulse.late if block is None else block.seconds
        if worker is None:
            return Facts(loop_late=late, block=block)
        beat, now = worker.beat, monotonic()
        readers = {repr(each.handler): each.readers for each in worker.consumers if each.readers}
        return Facts(
            member=worker.member,
            is_serving=worker.is_serving,
            is_stopping=worker.is_stopping,
            loop_late=late,
            block=block,
            beat_age=None if beat is None else now - beat.landed,
            beat_is_alive=beat is None or beat.is_alive or worker.is_stopping,
            turned={name: now - min(each.turned for each in some) for name, some in readers.items()},
            read={name: now - min(each.succeeded for each in some) for name, some in readers.items()},
        )

    def _blame(self, task: asyncio.Task[object] | None, frames: list[FrameType]) -> str:
        """The handler whose task the loop is in, else the one whose code is on the stack."""
        codes = {frame.f_code for frame in frames}
        for consumer, slot in self._slots():
            if slot.task is task and task is not None:
                return describe(consumer, slot)
        for consumer, _ in self._slots():
            if getattr(inspect.unwrap(consumer.handler.function), "__code__", None) in codes:
                return repr(consumer.handler)
        return "something that is no handler" if task is None else f"the task {task.get_name()}, which is no handler's"

    def _slots(self) -> Iterator[tuple[Consumer, Slot]]:
        worker = self._broker.worker
        for consumer in worker.consumers if worker is not None else ():
            for slot in consumer.slots:
                if slot.messages:
                    yield consumer, slot


def describe(consumer: Consumer, slot: Slot) -> str:
    """A running call: its handler, its message, for how long. Without key and payload."""
    messages = slot.messages
    first, more = messages[0], f" and {len(messages) - 1} more" if len(messages) > 1 else ""
    place = f"{first.topic}.{first.partition}"
    return (
        f"{consumer.handler!r} with message {first.id} of {place}, attempt {first.attempt}{more}, "
        f"running for {monotonic() - slot.started:.1f} s"
    )
