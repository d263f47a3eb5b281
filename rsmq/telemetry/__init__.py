"""Telemetry: what a worker and its groups are doing, for Prometheus, OpenTelemetry, probes and logs.

Everything here looks from outside, at counters that the roles keep anyway. What costs something per message (handler
seconds, traces, the message in log lines) is a middleware that exists only when it was asked for. Traces are in
`rsmq.telemetry.tracing`, which needs the extra `otel`.
"""

from rsmq.telemetry.context import MessageFilter, note_messages
from rsmq.telemetry.endpoint import Endpoint

__all__ = ["Endpoint", "MessageFilter", "note_messages"]
