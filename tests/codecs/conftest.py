"""A broker on the shared server."""

from __future__ import annotations

import pytest

from rsmq import Broker, Settings


@pytest.fixture
def broker(server_url: str, prefix: str) -> Broker:
    """A broker with the default settings, not connected yet."""
    return Broker(Settings(url=server_url, prefix=prefix, preflight="warn"))
