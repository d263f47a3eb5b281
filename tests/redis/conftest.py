"""A connection for tests of what is sent and received."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rsmq.redis.client.connector import Client
from rsmq.redis.client.raw_connection import RawConnection


@pytest.fixture
async def connection(client: Client) -> AsyncIterator[RawConnection]:
    """An open connection to the shared server."""
    opened = RawConnection(client)
    await opened.open()
    yield opened
    await opened.close()
