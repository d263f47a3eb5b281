"""The context of a message: written into its headers, and read from them."""

from __future__ import annotations

import re
from typing import Any, Final

from opentelemetry import baggage, propagate
from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)

from rsmq.model.message import HEADED, Message, stored_entry

PARENT: Final = "00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})"
match_parent: Final = re.compile(PARENT).fullmatch
match_only_parent: Final = re.compile(rb'\{"traceparent":"%b"\}' % PARENT.encode()).fullmatch
STANDARD: Final = {"traceparent", "tracestate", "baggage"}
EMPTY: Final = Context()


class RemoteSpan(NonRecordingSpan):
    """The span that published a message. Its ids are read when they are asked for: of most spans nothing is asked."""

    def __init__(self, match: re.Match[Any]) -> None:
        self._match = match
        self._read: SpanContext | None = None
        self.is_sampled = bool(int(match[3], 16) & TraceFlags.SAMPLED)

    def get_span_context(self) -> SpanContext:
        """Its ids."""
        if self._read is None:  # the SDK asks three times for each child
            trace_id, span_id, flags = [int(part, 16) for part in self._match.groups()]
            self._read = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
        return self._read

    def __repr__(self) -> str:
        return f"RemoteSpan({self.get_span_context()!r})"


class Propagation:
    """Writes and reads contexts. Checks at creation whether the configured propagators are standard."""

    def __init__(self) -> None:
        self.is_standard = set(propagate.get_global_textmap().fields) == STANDARD

    def inject(self, headers: dict[str, str], context: Context) -> None:
        """Add a context to headers."""
        here = get_current_span(context).get_span_context()
        if self.is_standard and here.is_valid and not here.trace_state and not baggage.get_all(context):
            headers["traceparent"] = f"00-{here.trace_id:032x}-{here.span_id:016x}-{here.trace_flags:02x}"
        else:
            propagate.inject(headers, context)

    def publisher(self, message: Message) -> Span:
        """The span that published a message. It is not valid if there is none."""
        return self._remote(message) or get_current_span(propagate.extract(message.headers, EMPTY))

    def extract(self, message: Message) -> tuple[Context, Span]:
        """The context of a message, and the span that published it."""
        span = self._remote(message)
        if span is not None:
            return set_span_in_context(span, EMPTY), span
        context = propagate.extract(message.headers, EMPTY)
        return context, get_current_span(context)

    def _remote(self, message: Message) -> RemoteSpan | None:
        """The span of a message whose context is nothing else; without the configured propagators."""
        if not self.is_standard:
            return None
        entry = stored_entry(message)
        match: re.Match[Any] | None = None
        if entry[::2] in HEADED:  # then there are no other headers
            match = match_only_parent(entry[-1])
        if match is None:
            headers = message.headers
            if "tracestate" not in headers and "baggage" not in headers:
                match = match_parent(headers.get("traceparent", ""))
        return None if match is None else RemoteSpan(match)


def is_sampled(span: Span) -> bool | None:
    """Whether a span is sampled. None: it is none."""
    if type(span) is RemoteSpan:
        return span.is_sampled
    origin = span.get_span_context()
    return origin.trace_flags.sampled if origin.is_valid else None
