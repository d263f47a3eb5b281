"""The time from which a message may start, by the rule of its handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, Final

from rsmq.errors import ConfigError
from rsmq.handler.middleware import Call
from rsmq.handler.quiet_hours import QuietHours, When
from rsmq.model.clock import ServerClock, epoch_ms, from_epoch_ms
from rsmq.model.interrupt import is_from_signal
from rsmq.model.message import Message

MOST_FAILED: Final = 10_000
"""Errors of a rule that are kept until their messages run."""


class StartTimes:
    """Asks the rule when a message could start. An error in it is that of an attempt, never a start at a wrong time."""

    def __init__(self, when: When, clock: ServerClock) -> None:
        self._until: Callable[[Message, datetime], datetime | None] = (
            when.until if isinstance(when, QuietHours) else lambda message, _now: when(message)
        )
        self._clock = clock
        self._failed: dict[Message, BaseException] = {}

    def now_ms(self) -> int:
        """The server's time, in ms since 1970; a test that moves the clock does not move the server's."""
        return self._clock.now_ms() - self._moved_ms

    @property
    def _moved_ms(self) -> int:
        return round(1000 * self._clock.moved)

    def due_ms(self, message: Message) -> int | None:
        """When a message may start, in ms since 1970 by the server's clock; None: now, or its call fails with the
        error of the rule."""
        now_ms, moved_ms = self.now_ms(), self._moved_ms
        try:
            due = self._until(message, from_epoch_ms(now_ms + moved_ms))
            if due is None:
                return None
            if not isinstance(due, datetime):
                raise ConfigError(f"when= has returned {due!r}: return an aware datetime, or None for now")
            due_ms = epoch_ms(due) - moved_ms
        except BaseException as error:
            if is_from_signal(error):
                raise
            if len(self._failed) >= MOST_FAILED:
                self._failed.clear()
            self._failed[message] = error
            return None
        return due_ms if due_ms > now_ms else None

    def guard(self, call: Call) -> Call:
        """A call that fails with the error of the rule, if there is one."""

        def guarded(message: Any) -> Awaitable[Any]:
            if self._failed and (error := self._failed.pop(message, None)) is not None:
                raise error
            return call(message)

        return guarded

    def __repr__(self) -> str:
        return f"<StartTimes failed={len(self._failed)}>"
