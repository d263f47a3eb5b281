"""Back-pressure: publishers are slowed down while the router of their partition lags."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from rsmq.gateway.fleet.router import MqttRouter
from rsmq.model.log_throttle import ThrottledLog

log = logging.getLogger("rsmq.gateway")

LAG_MS: Final = 1_000
"""A router lags when the oldest message that it is routing was stored so long ago."""
PRESSURE_TURN: Final = 0.25
"""Seconds between two looks at that."""
HOLD: Final = 2.5 * PRESSURE_TURN
"""How long acknowledgements of a partition are held back, unless a router still lags: one call of it may be lost."""


class Pressure:
    """The acknowledgements of messages that are stored, but that wait for a router that lags.

    A client has a limited number of unacknowledged messages, so it stops publishing. What it has published is safe.
    `tell` gets the partitions whose router lags here, for the other gateways.
    """

    def __init__(
        self, router: MqttRouter, tell: Callable[[Iterable[str]], None], loop_time: Callable[[], float]
    ) -> None:
        self._router = router
        self._tell = tell
        self._loop_time = loop_time
        self._until: dict[str, float] = {}
        self._held: dict[str, list[Callable[[], None]]] = {}
        self._throttled = ThrottledLog(log)

    @property
    def is_on(self) -> bool:
        """Whether any partition is held back."""
        return bool(self._until)

    @property
    def held(self) -> int:
        """Acknowledgements that wait."""
        return sum(map(len, self._held.values()))

    def hold(self, partitions: Iterable[str]) -> None:
        """A router lags, here or elsewhere."""
        until = self._loop_time() + HOLD
        for each in partitions:
            self._until[each] = until

    def after(self, partition: str, confirm: Callable[[], None]) -> None:
        """Acknowledge a message of a partition, at once or when its router lags no more."""
        if partition in self._until:
            self._held.setdefault(partition, []).append(confirm)
        else:
            confirm()

    def turn(self, now_ms: int) -> None:
        """Hold back where the router lags, and release where that is over."""
        lagging = [name for name, oldest in self._router.under_way.items() if now_ms - oldest > LAG_MS]
        if lagging:
            self._throttled.warn("publishers are slowed down", f"the router lags in {', '.join(sorted(lagging))}")
            self.hold(lagging)
            self._tell(lagging)
        now = self._loop_time()
        for partition in [each for each, until in self._until.items() if until <= now]:
            del self._until[partition]
            for confirm in self._held.pop(partition, ()):
                confirm()

    def __repr__(self) -> str:
        return f"<Pressure partitions={len(self._until)} held={self.held}>"
