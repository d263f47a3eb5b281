"""The name by which a limit counts a message, such as its provider or tenant."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from rsmq.consumer.waiting.raw_entries import RawEntries
from rsmq.handler.failure import describe
from rsmq.model.interrupt import is_from_signal
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.message import Message

KINDS: Final = frozenset({str, type(None)})
"""What the function of a limit returns nearly always. Anything else becomes text."""


class Naming:
    """Calls the function of a limit. If it fails, with any error, all such messages have one name: a limit is never
    ignored."""

    def __init__(self, function: Callable[[Message], str | None], log: logging.Logger) -> None:
        self._function = function
        self._throttled = ThrottledLog(log)

    def name(self, message: Message) -> str | None:
        """What a message is counted by; None: it is not limited."""
        try:
            name = self._function(message)
            return None if name is None else str(name)
        except BaseException as error:
            if is_from_signal(error):
                raise
            self._throttled.warn("the function of a limit has failed", f"{describe(error)} with {message}")
            return ""

    def names(self, raw: RawEntries, most: int) -> list[str | None]:
        """The names of the first of some raw entries."""
        try:
            names = list(map(self._function, raw.each(most)))
            if KINDS.issuperset(map(type, names)):
                return names
            return [None if name is None else str(name) for name in names]
        except BaseException as error:
            if is_from_signal(error):
                raise
            return list(map(self.name, raw.each(most)))
