"""Spans: what those of publishing and of handling have in common, by OpenTelemetry's messaging conventions."""

from __future__ import annotations

from opentelemetry.trace import Span, StatusCode

from rsmq.retry import Retry, describe


def attributes(kind: str, operation: str, topic: str) -> dict[str, str]:
    """What every span says: what is done, and with which topic."""
    return {
        "messaging.system": "rsmq",
        "messaging.operation.type": kind,
        "messaging.operation.name": operation,
        "messaging.destination.name": topic,
    }


def note_error(span: Span, error: BaseException) -> None:
    """A call that raised. That a handler asks for a retry is no error of anybody."""
    if isinstance(error, Retry):
        span.set_attribute("rsmq.outcome", "retry")
        return
    span.set_attribute("error.type", type(error).__qualname__)
    if isinstance(error, Exception):
        span.record_exception(error)
        span.set_status(StatusCode.ERROR, describe(error))
