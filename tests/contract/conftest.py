"""Brokers of one test: several of them are several members."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rsmq import Broker, Settings
from tests.contract.witness import Witness


@pytest.fixture
def make_broker(server_url: str, prefix: str) -> Callable[..., Broker]:
    """A broker on the shared server; the overrides are settings."""
    return lambda **overrides: Broker(Settings(url=server_url, prefix=prefix, preflight="warn", **overrides))


@pytest.fixture
def broker(make_broker: Callable[..., Broker]) -> Broker:
    """A broker with the default settings."""
    return make_broker()


@pytest.fixture
def witness() -> Witness:
    """What the handlers of a test have seen."""
    return Witness()
