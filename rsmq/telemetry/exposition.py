"""Samples as a page in the format that the scraper asks for (extra `prometheus`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rsmq.errors import ConfigError
from rsmq.telemetry.histogram import Histogram
from rsmq.telemetry.metric import Metric, Sample

Read = Callable[[], Iterable[Sample]]
Page = Callable[[str], tuple[str, bytes]]
"""From an `Accept` header to content type and body."""


class Collector:
    """Reads the samples when a scraper asks, so that nothing is counted twice or kept."""

    def __init__(self, read: Read, family: Callable[[Metric], Any]) -> None:
        self._read, self._family = read, family

    def collect(self) -> Iterator[Any]:
        """The families, with all their samples together."""
        families: dict[Metric, Any] = {}
        for sample in self._read():
            family = families.get(sample.metric)
            if family is None:
                family = families[sample.metric] = self._family(sample.metric)
            add(family, sample)
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
    """What answers a scrape, with the process's own figures (CPU, memory, open files) beside ours.

    Raises ConfigError without prometheus-client.
    """
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector
        from prometheus_client.exposition import choose_encoder
        from prometheus_client.metrics_core import Metric as Family
    except ImportError:
        raise ConfigError("metrics need the extra `prometheus`: pip install 'rsmq[prometheus]'") from None

    def family(metric: Metric) -> Family:
        return Family(metric.name.removesuffix("_total"), metric.text, metric.kind)

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    for read in reads:
        registry.register(Collector(read, family))

    def page(accept: str) -> tuple[str, bytes]:
        encode, content_type = choose_encoder(accept)
        return content_type, encode(registry)

    return page
