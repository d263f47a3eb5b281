"""The types of the fixtures of `pytest_rsmq`, for the parameters of a test: `rsmq_harness: HarnessFixture`."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from rsmq.broker import Broker
from rsmq.broker.sync_broker import SyncBroker
from rsmq.model.duration import Duration
from rsmq.testing.chaos import Chaos
from rsmq.testing.harness import Harness


class HarnessFixture(Protocol):
    """The type of `rsmq_harness`. `overrides` are settings of this test."""

    def __call__(self, broker: Broker | SyncBroker, *, patience: Duration = "30s", **overrides: Any) -> Harness:
        """A harness of the broker: `async with rsmq_harness(broker) as test:`."""
        ...


ChaosFixture: TypeAlias = type[Chaos]
"""What `rsmq_chaos` is."""
