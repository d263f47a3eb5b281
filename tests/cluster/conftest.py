"""One cluster for all tests of this directory; a test that breaks it heals it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from rsmq import Broker
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector
from tests.chaos.scenario_run import ScenarioRun
from tests.cluster.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three masters, three replicas."""
    with Cluster() as running:
        yield running


@pytest.fixture
def settings(cluster: Cluster, prefix: str) -> Settings:
    """Defaults on the cluster. Its nodes warn of nothing that these tests are about."""
    return Settings(url=cluster.url, prefix=prefix)


@pytest.fixture
def connector(settings: Settings) -> Connector:
    """Makes clients for the cluster."""
    assert settings.url is not None
    return Connector(settings.url, settings)


@pytest.fixture
async def client(connector: Connector, no_task_left: None) -> AsyncIterator[Client]:
    """A connected client, closed afterwards."""
    async with connector.connected() as connected:
        yield connected


@pytest.fixture
def make_broker(cluster: Cluster, prefix: str) -> Callable[..., Broker]:
    """A broker on the cluster; the overrides are settings."""
    return lambda **overrides: Broker(Settings(url=cluster.url, prefix=prefix, **overrides))


@pytest.fixture
def broker(make_broker: Callable[..., Broker]) -> Broker:
    """A broker with the default settings, not connected yet."""
    return make_broker()


@pytest.fixture
def run_on(tmp_path: Path, cluster: Cluster) -> Callable[..., ScenarioRun]:
    """Makes the run of a test on the cluster."""
    return lambda kind=ScenarioRun, **job: kind(tmp_path, cluster.url, 1, **job)
