"""Which publishes get a span, decided before OpenTelemetry makes one: an unsampled span costs half a publish."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from random import random
from typing import Any, Final

from opentelemetry import context
from opentelemetry.trace import Span, SpanKind, Tracer, get_current_span

from rsmq.telemetry.propagation import Propagation

Decision = Mapping[str, str] | int
"""The headers to add to a publish that gets no span; or the id of the trace of one that gets a span, 0 for any."""

NO_HEADERS: Final[Mapping[str, str]] = {}
KNOWN: Final = re.compile(
    r"ParentBased\{root:(?:TraceIdRatioBased\{(?P<rate>[-+.0-9e]+)\}|AlwaysOffSampler),"
    r"remoteParentSampled:\w+,remoteParentNotSampled:AlwaysOffSampler,"
    r"localParentSampled:\w+,localParentNotSampled:AlwaysOffSampler\}"
)
"""The description of a sampler whose decision for an unsampled publish is known without asking it."""
LOW: Final = (1 << 64) - 1
"""The part of a trace id that such a sampler compares."""

get_current: Final = context.get_current


class Sampling:
    """Decides which publishes get a span.

    With share 1 the SDK's sampler decides, and the context carries its decision. A sampler that takes a rate of the
    trace ids is not asked: its comparison is made here, and only a publish that it samples gets a span, with the id
    that was compared. Below 1 the share is drawn first: inside a span as that span, else at random. A message that it
    leaves out carries no context, so its handler begins no trace of its own.
    """

    def __init__(self, share: float, tracer: Tracer, propagation: Propagation) -> None:
        self.share = share
        self.is_all = share >= 1
        self._propagation = propagation
        self._bound = known_bound(tracer) if propagation.is_standard else None
        self._tracer = tracer
        if self._bound is not None:
            self._tracer = copy(tracer)  # the provider gives the same one to others
            self._ids = self._tracer.id_generator = DrawnIds(tracer.id_generator)  # type: ignore[attr-defined]
            self._flags = "02" if self._ids.is_random else "00"

    def decide(self) -> Decision:
        """Decide for a publish that begins now."""
        here = get_current()
        if not here:
            if not self.is_all and random() >= self.share:
                return NO_HEADERS
            return 0 if self._bound is None else self._decide_root(self._bound)
        parent = get_current_span(here).get_span_context()
        if not parent.is_valid:
            return 0 if self.is_all or random() < self.share else NO_HEADERS
        if parent.trace_flags.sampled or (self.is_all and self._bound is None):
            return 0
        if not self.is_all:
            return NO_HEADERS
        headers = dict[str, str]()
        self._propagation.inject(headers, here)
        return headers

    def _decide_root(self, bound: int) -> Decision:
        trace_id = self._ids.generate_trace_id()
        if trace_id & LOW < bound:
            return trace_id
        return {"traceparent": f"00-{trace_id:032x}-{self._ids.generate_span_id():016x}-{self._flags}"}

    def start(self, trace_id: int, name: str, attributes: Mapping[str, str]) -> Span:
        """The span of a publish. The current one is its parent; one that begins a trace may have its id already."""
        if trace_id:
            self._ids.drawn = trace_id
        span = self._tracer.start_span(name, kind=SpanKind.PRODUCER, attributes=attributes)
        if trace_id:
            self._ids.drawn = 0  # it has a parent after all
        return span


class DrawnIds:
    """The SDK's generator of ids, for which an id of a trace can be chosen before."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.drawn = 0
        self.generate_span_id = generator.generate_span_id
        self.is_trace_id_random = getattr(generator, "is_trace_id_random", lambda: False)
        self.is_random = self.is_trace_id_random()

    def generate_trace_id(self) -> int:
        """The id that was chosen, else a new one."""
        drawn, self.drawn = self.drawn, 0
        return drawn or int(self._generator.generate_trace_id())


def known_bound(tracer: Tracer) -> int | None:
    """Below which number the lower half of a trace id is sampled. None: the tracer has another kind of sampler."""
    sampler = getattr(tracer, "sampler", None)
    if not type(sampler).__module__.startswith("opentelemetry.sdk.") or not hasattr(tracer, "id_generator"):
        return None
    match = KNOWN.fullmatch(sampler.get_description())  # type: ignore[union-attr]
    return None if match is None else round(float(match["rate"] or 0) * (LOW + 1))
