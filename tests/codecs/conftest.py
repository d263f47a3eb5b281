"""A broker on the shared server, and what its handlers have seen."""

from __future__ import annotations

import pytest

from rsmq import Broker, Settings
from tests.contract.witness import Witness


@pytest.fixture
def broker(server_url: str, prefix: str) -> Broker:
    """A broker with the default settings, not connected yet."""
    return Broker(Settings(url=server_url, prefix=prefix, preflight="warn"))


@pytest.fixture
def witness() -> Witness:
    """Records the handled messages of a test."""
    return Witness()
