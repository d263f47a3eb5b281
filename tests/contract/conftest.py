"""Brokers for a test: each of them is one member. `make matrix` runs the tests on other servers, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rsmq import Broker, Settings
from tests.matrix.way import UrlOf, chosen


@pytest.fixture(scope="session")
def url_of(request: pytest.FixtureRequest) -> Iterator[UrlOf]:
    """The server of the tests: the shared one, or the one that CONTRACT_WAY names."""
    with chosen() as way:
        if way is None:
            url = request.getfixturevalue("server").url
            yield lambda _: url
        else:
            yield way


@pytest.fixture
def server_url(url_of: UrlOf, prefix: str) -> str:
    """The URL of this test."""
    return url_of(prefix)


@pytest.fixture
def make_broker(server_url: str, prefix: str) -> Callable[..., Broker]:
    """A broker on the shared server; the overrides are settings."""
    return lambda **overrides: Broker(Settings(url=server_url, prefix=prefix, preflight="warn", **overrides))


@pytest.fixture
def broker(make_broker: Callable[..., Broker]) -> Broker:
    """A broker with the default settings."""
    return make_broker()
