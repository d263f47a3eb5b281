"""On a standalone cluster of two workers, on the Java from the wheel, through the death of an executor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from rsmq.model.settings import Settings
from tests.pipeline.conftest import Store
from tests.pipeline.spark_cluster import SparkCluster
from tests.pipeline.vault import Vault

JOB = Path(__file__).with_name("cluster_job.py")


pytestmark = [pytest.mark.spark_cluster, pytest.mark.timeout(620)]


@pytest.fixture
def run(connection: dict[str, str], tmp_path: Path) -> Callable[[str, str], None]:
    """`run(topic, target)`: the job, on a master and two workers, of whose executors one dies; it must end well."""

    def job(topic: str, target: str) -> None:
        flag, reach = tmp_path / "killed", (connection["url"], connection["prefix"])
        with SparkCluster(tmp_path, 2) as cluster:
            cluster.run(sys.executable, str(JOB), cluster.url, *reach, topic, target, str(flag))
            assert flag.exists(), "no executor was killed"
            assert sum(cluster.executors()) >= 3, "both workers had one, and one had another"
            assert min(cluster.executors()) >= 1

    return job


def test_an_executor_is_killed(run: Callable[[str, str], None], store: Store, topic: str) -> None:
    """In the middle of writing: its tasks run again elsewhere, every message is copied exactly once, in order."""
    copy = f"{topic}-copy"
    store.fill(topic, 2100)
    store.make(copy, 2)
    run(topic, copy)
    for partition in (0, 1):
        copied, original = ([fields for _, fields in store.entries(name, partition)] for name in (copy, topic))
        assert copied == original


@pytest.mark.long_chaos("most of a minute")
def test_an_executor_is_killed_under_an_archive(
    run: Callable[[str, str], None], store: Store, topic: str, spark: SparkSession, settings: Settings, tmp_path: Path
) -> None:
    """In the middle of reading: every message is in the archive exactly once."""
    store.fill(topic, 2100)
    run(topic, str(tmp_path / "archive"))
    assert Vault(spark, tmp_path / "archive", settings).archived(topic) == list(range(2100))
