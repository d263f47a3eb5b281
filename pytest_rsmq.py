"""The pytest plugin of rsmq: fixtures for tests of your own handlers (`docs/testing.md`).

pytest imports this file in every project where rsmq is installed. Therefore it imports only pytest; rsmq is loaded by
the first test that uses a fixture. No fixture is automatic.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # nothing of rsmq is loaded until a test asks for it
    from rsmq import Settings
    from rsmq.testing import Chaos, HarnessFixture


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rsmq-url`, or `rsmq_url` in the configuration: a server to use instead of a new one."""
    group = parser.getgroup("rsmq")
    group.addoption("--rsmq-url", default=None, help="server for rsmq's fixtures (default: a new one for the session)")
    parser.addini("rsmq_url", "server for rsmq's fixtures", default="")


@pytest.fixture(scope="session")
def rsmq_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a real server, which is started for this session and ends with it."""
    from rsmq.testing import ThrowawayServer

    given = request.config.getoption("--rsmq-url") or request.config.getini("rsmq_url")
    if given:
        yield str(given)
        return
    with ThrowawayServer() as server:
        yield server.url


@pytest.fixture
def rsmq_prefix(rsmq_url: str) -> Iterator[str]:
    """A key prefix that only this test uses. Its keys are removed afterwards."""
    from rsmq.testing.server import remove_keys

    prefix = f"test-{uuid.uuid4().hex[:12]}"
    yield prefix
    remove_keys(rsmq_url, prefix)


@pytest.fixture
def rsmq_settings(rsmq_url: str, rsmq_prefix: str) -> Settings:
    """Settings for a broker of the test's own: `Broker(rsmq_settings)`."""
    from rsmq import Settings

    return Settings(url=rsmq_url, prefix=rsmq_prefix, preflight="warn")


@pytest.fixture
def rsmq_harness(rsmq_url: str, rsmq_prefix: str) -> HarnessFixture:
    """Makes a harness: `async with rsmq_harness(broker) as test:`. See `rsmq.testing.Harness`."""
    from rsmq.testing import Harness

    return lambda broker, **options: Harness(broker, url=rsmq_url, prefix=rsmq_prefix, **options)


@pytest.fixture
def rsmq_chaos() -> type[Chaos]:
    """Makes a chaos run: `async with rsmq_chaos("shop:broker", workers=3) as chaos:`. See `rsmq.testing.Chaos`."""
    from rsmq.testing import Chaos

    return Chaos
