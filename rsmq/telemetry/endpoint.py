"""The HTTP endpoint: /metrics, /livez and /readyz, served from threads, so that a blocked loop still answers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from pydantic_core import to_json

from rsmq.broker import Broker
from rsmq.errors import ConfigError
from rsmq.model.own_tasks import Beside
from rsmq.telemetry.health import HealthLimits, Probe, WorkerProbe, report
from rsmq.telemetry.listener import Address, Answer, Listener
from rsmq.telemetry.metric import BLOCKED, LOOP_LAG, Histogram, Metric, Sample
from rsmq.telemetry.worker_metrics import HandlerDuration, WorkerMetrics

log = logging.getLogger("rsmq.endpoint")

PATHS: Final[dict[Probe, str]] = {"live": "livez", "ready": "readyz"}

Read = Callable[[], Iterable[Sample]]
Page = Callable[[str], tuple[str, bytes]]
"""From an `Accept` header to content type and body."""


class Endpoint:
    """Serves the metrics and probes of one broker's worker.

    `async with endpoint.serving():` around `broker.run()`, or `broker.lifespan(endpoint.serving)`. It registers a
    middleware that times handlers, so create it before the broker runs; handlers may be registered before or after it.
    """

    def __init__(self, broker: Broker, address: str | Address) -> None:
        self._broker = broker
        self._address = Address.parse(address) if isinstance(address, str) else address
        self._worker_probe = WorkerProbe(broker)
        self._handler_duration = HandlerDuration(broker)
        self._page: Page = page_of(WorkerMetrics(broker).read, self._handler_duration.read, self._read_loop)
        self.address: Address | None = None
        self._passes: dict[Probe, bool] = {"live": True, "ready": True}
        broker.middleware(self._handler_duration)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve for the length of the block."""
        probes = {"/livez": partial(self._probe, "live"), "/readyz": partial(self._probe, "ready")}
        listener = Listener(self._address, {"/metrics": self._metrics, **probes})
        self.address = listener.address
        log.info("metrics and health at http://%s", listener.address)
        try:
            async with Beside(self._worker_probe.loop_monitor.run):
                yield
        finally:
            self.address = None
            listener.close()

    def _read_loop(self) -> list[Sample]:
        monitor = self._worker_probe.loop_monitor
        return [Sample(LOOP_LAG, (), monitor.lag), Sample(BLOCKED, (), monitor.late)]

    def _metrics(self, accept: str) -> Answer:
        return (HTTPStatus.OK, *self._page(accept))

    def _probe(self, probe: Probe, _accept: str) -> Answer:
        answer = report(self._worker_probe.read(), HealthLimits.of(self._broker.settings), probe)
        is_ok = answer["status"] == "ok"
        is_serving = (
            answer["is_serving"] and not answer["is_stopping"]
        )  # before and after that it is not ready, of course
        if is_ok is not self._passes[probe] and (probe == "live" or is_serving):
            self._passes[probe] = is_ok
            if is_ok:
                log.info("/%s passes again", PATHS[probe])
            else:
                level = logging.ERROR if probe == "live" else logging.WARNING
                log.log(level, "/%s fails: %s", PATHS[probe], "; ".join(answer["troubles"]))
        status = HTTPStatus.OK if is_ok else HTTPStatus.SERVICE_UNAVAILABLE
        return status, "application/json", to_json(answer, indent=2) + b"\n"

    def __repr__(self) -> str:
        return f"<Endpoint {self.address or self._address} {'open' if self.address else 'closed'}>"


class Collector:
    """Reads the samples at each scrape, so no value is kept or counted twice."""

    def __init__(self, read: Read, family: Callable[[Metric], Any]) -> None:
        self._read, self._family = read, family

    def collect(self) -> Iterator[Any]:
        """The families, with all their samples together."""
        families: dict[Metric, Any] = {}
        for sample in self._read():
            if sample.metric not in families:
                families[sample.metric] = self._family(sample.metric)
            add(families[sample.metric], sample)
        yield from families.values()


def add(family: Any, sample: Sample) -> None:
    """One sample, or all the series of a histogram."""
    metric, value = sample.metric, sample.value
    labels = dict(zip(metric.labels, sample.labels, strict=True))
    if isinstance(value, Histogram):
        count = 0.0
        for bound, count in value.buckets():
            family.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, count)
        family.add_sample(f"{metric.name}_sum", labels, value.sum)
        family.add_sample(f"{metric.name}_count", labels, count)
    else:
        family.add_sample(metric.name, labels, value)


def page_of(*reads: Read) -> Page:
    """The function that answers a scrape, with the process's own metrics (CPU, memory, open files).

    Raises ConfigError without prometheus-client.
    """
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector, metrics_core
        from prometheus_client.exposition import choose_encoder
    except ImportError:
        raise ConfigError("metrics need the extra `prometheus`: pip install 'rsmq[prometheus]'") from None

    def family(metric: Metric) -> metrics_core.Metric:
        return metrics_core.Metric(metric.name.removesuffix("_total"), metric.text, metric.kind)

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    for read in reads:
        registry.register(Collector(read, family))

    def page(accept: str) -> tuple[str, bytes]:
        encode, content_type = choose_encoder(accept)
        return content_type, encode(registry)

    return page
