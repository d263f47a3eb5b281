"""The environment in which the examples run: a server that keeps what it is given, so that nothing is warned of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.program import environment
from tests.servers import Server


@pytest.fixture(scope="package")
def keeping_server() -> Iterator[Server]:
    """A server with an append-only file: the preflight has nothing to say, and stderr stays empty."""
    with Server(aof=True) as running:
        yield running


@pytest.fixture
def env(keeping_server: Server, prefix: str, tmp_path: Path) -> dict[str, str]:
    """The environment of one example, under a prefix of the test's own."""
    database = f"sqlite+aiosqlite:///{tmp_path / 'examples.db'}"
    return environment(RSMQ_URL=keeping_server.url, RSMQ_PREFIX=prefix, DATABASE_URL=database)
