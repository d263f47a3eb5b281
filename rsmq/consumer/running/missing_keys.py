"""Messages that this process cannot decode yet: they wait, uncounted, until a key is there or patience ends. No I/O."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from rsmq.errors import BodyUnavailable, CannotDecode, WrongBody
from rsmq.handler.retry import Park
from rsmq.model.clock import monotonic
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.words import duration

log = logging.getLogger("rsmq.codecs")

SHORTEST: Final = timedelta(seconds=1)
LONGEST: Final = timedelta(minutes=1)
"""Between two looks at a message: a quarter of the time for which its key has been missing, within these."""
FORGOTTEN: Final = 2.5 * LONGEST.total_seconds()
"""Seconds after which a key that no message has needed is missing no more."""
MOST_NAMES: Final = 100
OTHERS: Final = "other keys"


@dataclass(slots=True)
class Missing:
    """A key, or a coding: since when a message has needed it, and when the last one did, by the monotonic clock.
    `needs`: its name for operators."""

    since: float
    last: float
    needs: str


class MissingKeys:
    """What the messages of one handler need, and this member does not have.

    `patience` counts in each member from the first message that needs a key, so a fleet that was down for longer than
    that loses nothing when it starts. A body that its store gives otherwise than it was published has a
    patience of its own.
    """

    def __init__(self, name: str, patience: timedelta) -> None:
        self._name = name
        self._patience = patience
        self._missing: dict[str, Missing] = {}
        self._throttled = ThrottledLog(log)

    def wait(self, error: CannotDecode) -> Park | None:
        """How long a message waits for its key. None: no longer, it becomes a dead letter. For a store that is away
        it waits for as long as that takes."""
        now, needed = monotonic(), error.body if isinstance(error, WrongBody) else error.needs
        name = needed if needed in self._missing or len(self._missing) < MOST_NAMES else OTHERS
        missing = self._missing.get(name)
        if missing is None or now - missing.last > FORGOTTEN:
            missing = self._missing[name] = Missing(now, now, error.needs)
        missing.last = now
        waited = timedelta(seconds=now - missing.since)
        if isinstance(error, BodyUnavailable):
            self._throttled.warn(f"{self._name}: messages wait for the {missing.needs}", error)
            return Park(max(SHORTEST, min(LONGEST, waited / 4)), is_counted=False)
        left = self._patience - waited
        if left <= timedelta(0):
            return None
        self._throttled.warn(
            f"{self._name}: messages wait for the {missing.needs}",
            f"they become dead letters in {duration(left)}: {error}",
        )
        return Park(min(left, max(SHORTEST, min(LONGEST, waited / 4))), is_counted=False)

    def standing(self) -> dict[str, int]:
        """For how many seconds messages have needed what. May be called from any thread."""
        now, found = monotonic(), dict[str, int]()
        for missing in list(self._missing.values()):
            if now - missing.last <= FORGOTTEN:
                found[missing.needs] = max(found.get(missing.needs, 0), int(now - missing.since))
        return found

    def __repr__(self) -> str:
        return f"<MissingKeys {self.standing()}>"
