"""Handler seconds: a middleware that exists only where metrics are on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

from rsmq.handler import Handler
from rsmq.message import Origin
from rsmq.middleware import Call
from rsmq.telemetry.histogram import BOUNDS, Histogram
from rsmq.telemetry.metric import FAILED, SECONDS, Sample


class Stopwatch:
    """Times every handler call, one clock pair and one bisection each; a batch is one call.

    Time that a handler spends waiting counts: it is what its messages wait for.
    """

    def __init__(self, handlers: Sequence[Handler]) -> None:
        self._handlers = {(each.topic, each.group): each.name for each in handlers}
        self._seconds = {place: Histogram() for place in self._handlers}
        self._failures = dict.fromkeys(self._handlers, 0)
        self._latest: tuple[Origin | None, Histogram] = None, Histogram()

    async def __call__(self, work: Any, call_next: Call) -> Any:
        """The middleware."""
        origin = (work if type(work) is not list else work[0]).origin
        latest, histogram = self._latest  # messages of one partition come in rows
        if latest is not origin:
            histogram = self._seconds[origin.topic, origin.group]
            self._latest = origin, histogram
        started = perf_counter()
        try:
            return await call_next(work)
        except Exception:
            self._failures[origin.topic, origin.group] += 1
            raise
        finally:
            seconds = perf_counter() - started
            histogram.counts[bisect_left(BOUNDS, seconds)] += 1  # `observe`, without its call
            histogram.sum += seconds

    def read(self) -> Iterator[Sample]:
        """What was counted so far."""
        for place, name in self._handlers.items():
            yield Sample(SECONDS, (*place, name), self._seconds[place])
            yield Sample(FAILED, (*place, name), self._failures[place])
