"""The environment in which the examples run: the shared server, under a prefix of the test's own."""

from __future__ import annotations

import pytest

from tests.examples.program import environment


@pytest.fixture
def env(server_url: str, prefix: str) -> dict[str, str]:
    """The environment of one example."""
    return environment(RSMQ_URL=server_url, RSMQ_PREFIX=prefix)
