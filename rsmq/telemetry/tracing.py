"""Traces from publish to handler to publish, by OpenTelemetry's messaging conventions (extra `otel`).

The context travels in the message's headers (`traceparent`). Nothing here exists for a broker that is not traced: the
publisher is a subclass, the handlers' side a middleware.
"""

from __future__ import annotations

from rsmq.broker import Broker
from rsmq.connect import Client
from rsmq.errors import ConfigError
from rsmq.inspector import installed
from rsmq.keys import Keys
from rsmq.producer import Producer
from rsmq.settings import Settings
from rsmq.topic import Topics

try:
    from opentelemetry.trace import TracerProvider, get_tracer

    from rsmq.telemetry.carriage import Carriage
    from rsmq.telemetry.choice import Choice
    from rsmq.telemetry.traced_handling import TracedHandling
    from rsmq.telemetry.traced_producer import TracedProducer
except ImportError as error:
    raise ConfigError("traces need the extra `otel`: pip install 'rsmq[otel]'") from error


def trace(broker: Broker, tracer_provider: TracerProvider | None = None, *, share: float = 1.0) -> None:
    """Trace what this broker publishes and handles, with the global tracer provider or a given one.

    Call it before the broker connects. Handler middlewares registered later run inside of the span. With `share` below
    1 only that share of the publishes begins a trace; the others cost next to nothing, here and in their handlers.
    """
    if broker.producer is not None:
        raise ConfigError("the broker is connected already: call trace(broker) where it is made")
    if not 0 <= share <= 1:
        raise ConfigError(f"share={share!r} is not possible: use 0 to 1, such as 0.01 for one in a hundred")
    tracer, carriage = get_tracer("rsmq", installed("rsmq"), tracer_provider), Carriage()

    def make(client: Client, keys: Keys, settings: Settings, topics: Topics) -> Producer:
        return TracedProducer(client, keys, settings, topics, Choice(share), tracer, carriage)

    broker.make_producer = make
    broker.middleware(TracedHandling(Choice(share), tracer, carriage))
