"""When a message may start, while the clock goes on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from rsmq.consumer.waiting.start_times import StartTimes
from rsmq.model.clock import ServerClock, epoch_ms
from rsmq.model.message import Message, MessageOrigin

TOMORROW = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)


class TickingClock(ServerClock):
    """A millisecond passes with each look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def now_ms(self) -> int:
        self.looks += 1
        return epoch_ms(TOMORROW - timedelta(days=1)) + self.looks


def test_message_starts_at_the_time_that_its_rule_names_and_not_a_millisecond_before() -> None:
    """The clock may tick while the rule is asked."""
    message = Message(MessageOrigin("orders", 0, "billing"), b"1-0", [b"data", b"{}"])
    times = StartTimes(lambda _: TOMORROW, TickingClock())
    assert times.due_ms(message) == epoch_ms(TOMORROW)
