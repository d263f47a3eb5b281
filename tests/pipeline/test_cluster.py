"""On a Spark of several JVMs, on the Java from the wheel, through the death of an executor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.conftest import Store
from tests.pipeline.fleet import environment, spark_home

JOB = Path(__file__).with_name("cluster_job.py")


@pytest.mark.spark_cluster
@pytest.mark.timeout(240)
def test_an_executor_is_killed(place: dict[str, str], store: Store, topic: str, tmp_path: Path) -> None:
    """Its tasks run again elsewhere: every message is copied exactly once, in order."""
    copy, flag = f"{topic}-copy", tmp_path / "killed"
    store.fill(topic, 2000)
    store.make(copy, 2)
    command = [sys.executable, str(JOB), "local-cluster[2,1,1024]", place["url"], place["prefix"], topic, copy]
    command.append(str(flag))
    variables = environment(spark_home(tmp_path / "spark"))
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=230, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert flag.exists(), "no executor was killed"
    assert len(list((tmp_path / "spark" / "work").glob("app-*/*"))) >= 2, "there was one executor only"
    for partition in (0, 1):
        copied, original = ([fields for _, fields in store.entries(name, partition)] for name in (copy, topic))
        assert copied == original
