"""Telemetry: metrics for Prometheus, probes, OpenTelemetry traces, and the message in log records.

`Endpoint` (`endpoint.py`) serves a worker's own counters (`worker_metrics.py`), its loop lag (`loop_monitor.py`) and
its probes (`health.py`); `exporter.py` serves the metrics of topics and groups. Both use the HTTP server in
`listener.py`. `metric.py` lists all metrics. These only read counters that exist anyway. What costs something for each
message (handler seconds, traces, the message in log records) is a middleware that exists only on request. Traces are in
`rsmq.telemetry.tracing`, which needs the extra `otel`: `sampling.py` decides about them, `propagation.py` carries them.
"""

from rsmq.telemetry.context import MessageFilter, note_messages
from rsmq.telemetry.endpoint import Endpoint

__all__ = ["Endpoint", "MessageFilter", "note_messages"]
