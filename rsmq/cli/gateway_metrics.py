"""The metrics of a gateway process, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from rsmq.gateway import Gateway
from rsmq.telemetry import metric
from rsmq.telemetry.endpoint import page_of
from rsmq.telemetry.listener import Address, Answer, Listener
from rsmq.telemetry.metric import Histogram, Metric, Sample

PLAIN = {
    "connects accepted": metric.MQTT_CONNECTS,
    "disconnects": metric.MQTT_DISCONNECTS,
    "messages received": metric.MQTT_MESSAGES,
    "wills published": metric.MQTT_WILLS,
}
BY_REASON: dict[str, Metric] = {
    "dropped": metric.MQTT_DROPPED, "refused": metric.MQTT_REFUSED, "failed": metric.MQTT_FAILED
}  # fmt: skip
"""What stands in front of the reason in the name of a counter."""


class Durations:
    """The durations of one gateway, which it measures only if its metrics are served."""

    def __init__(self) -> None:
        self._stored = Histogram()
        self._delivered = Histogram()
        self.stored = self._stored.observe
        self.delivered = self._delivered.observe

    def samples(self) -> Iterator[Sample]:
        """Both histograms."""
        yield Sample(metric.MQTT_STORED_SECONDS, (), self._stored)
        yield Sample(metric.MQTT_DELIVERY_SECONDS, (), self._delivered)


def read(gateway: Gateway, durations: Durations) -> Iterator[Sample]:
    """The samples of one gateway. It may be called from any thread."""
    context, router, pressure = gateway.context, gateway.router, gateway.pressure
    if context is None or router is None or pressure is None:
        return
    counts = dict(context.counts)
    yield Sample(metric.MQTT_CONNECTIONS, (), len(context.clients.connections))
    yield Sample(metric.MQTT_UNCONFIRMED, (), context.ingest.unconfirmed)
    yield Sample(metric.MQTT_HELD, (), pressure.held)
    yield Sample(metric.MQTT_ROUTED, (), router.routed)
    yield Sample(metric.MQTT_LETTERS, (), router.letters)
    yield from durations.samples()
    for direction in ("received", "sent"):
        yield Sample(metric.MQTT_BYTES, (direction,), counts.get(f"bytes {direction}", 0))
    for name, family in PLAIN.items():
        yield Sample(family, (), counts.get(name, 0))
    for name, number in counts.items():
        kind, colon, reason = name.partition(": ")
        if colon:
            yield Sample(BY_REASON[kind], (reason,), number)


@contextmanager
def serving(gateway: Gateway, address: Address) -> Iterator[Address]:
    """Answer /metrics, /livez and /readyz for the length of the block."""
    gateway.timings = durations = Durations()
    page = page_of(lambda: read(gateway, durations))

    def metrics(accept: str) -> Answer:
        return (HTTPStatus.OK, *page(accept))

    def live(_accept: str) -> Answer:
        return HTTPStatus.OK, "text/plain", b"ok\n"

    def ready(_accept: str) -> Answer:
        is_ready = bool(gateway.ports) and not gateway.is_ended
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return status, "text/plain", b"ok\n" if is_ready else b"it does not listen\n"

    listener = Listener(address, {"/metrics": metrics, "/livez": live, "/readyz": ready})
    try:
        yield listener.address
    finally:
        listener.close()
