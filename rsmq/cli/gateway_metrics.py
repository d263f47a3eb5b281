"""The metrics of a gateway process, for Prometheus."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from pydantic_core import to_json

from rsmq.gateway import Gateway
from rsmq.gateway.gateway import measure
from rsmq.telemetry import metric
from rsmq.telemetry.endpoint import page_of
from rsmq.telemetry.listener import Address, Answer, Listener
from rsmq.telemetry.metric import Histogram, Metric, Sample

log = logging.getLogger("rsmq.endpoint")

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
    for needs, number in dict(context.counts.held).items():
        yield Sample(metric.MQTT_UNREADABLE, (needs,), number)
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
    durations = Durations()
    measure(gateway, durations)
    is_told = False
    page = page_of(lambda: read(gateway, durations))

    def metrics(accept: str) -> Answer:
        return (HTTPStatus.OK, *page(accept))

    def live(_accept: str) -> Answer:
        return HTTPStatus.OK, "application/json", b'{"status": "ok"}\n'

    def ready(_accept: str) -> Answer:
        nonlocal is_told
        troubles = gateway.troubles()
        if bool(troubles) is not is_told and gateway.ports:
            is_told = bool(troubles)
            log.warning("/readyz fails: %s", "; ".join(troubles)) if troubles else log.info("/readyz passes again")
        status = HTTPStatus.SERVICE_UNAVAILABLE if troubles else HTTPStatus.OK
        answer = {"status": "failing" if troubles else "ok", "troubles": troubles}
        return status, "application/json", to_json(answer) + b"\n"

    listener = Listener(address, {"/metrics": metrics, "/livez": live, "/readyz": ready})
    try:
        yield listener.address
    finally:
        listener.close()
