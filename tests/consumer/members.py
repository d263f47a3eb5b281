"""What the tests of consumers look at inside a running worker."""

from __future__ import annotations

from rsmq import Broker
from rsmq.consumer.consumer import Consumer


def consumer_of(broker: Broker) -> Consumer:
    """The consumer of its only handler."""
    assert broker.worker is not None
    (consumer,) = broker.worker.consumers
    return consumer
