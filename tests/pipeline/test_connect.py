"""Spark Connect: a real server, in the JVM of the tests, and clients in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkImportError
from pyspark.sql import SparkSession

from rsmq.cli.pipeline import spark_session
from rsmq.errors import ConfigError, RsmqError
from rsmq.pipeline.spark.errors import spark_errors
from rsmq.pipeline.spark.session import start_session
from rsmq.testing.server import free_port
from tests.pipeline.conftest import Store
from tests.pipeline.spark_cluster import ROOT

CLIENT = Path(__file__).with_name("connect_client.py")
PATH = "/usr/local/bin:/usr/bin:/bin"
"""That of cron, systemd and IDEs: without a virtual environment."""


@pytest.fixture
def remote(spark: SparkSession) -> Iterator[str]:
    """The address of a server of Spark Connect."""
    pytest.importorskip("grpc", reason="pip install 'pyspark[connect]'")
    jvm: Any = spark._jvm
    context: Any = spark.sparkContext._jsc.sc()
    port = free_port()
    context.conf().set("spark.connect.grpc.binding.port", str(port))
    context.conf().set("spark.connect.grpc.binding.address", "127.0.0.1")
    server = jvm.org.apache.spark.sql.connect.SparkConnectPlugin().driverPlugin()
    server.init(context, None)
    yield f"sc://127.0.0.1:{port}"
    server.shutdown()


@pytest.mark.long_chaos("20 seconds of CPU")
@pytest.mark.timeout(620)
def test_connect_client_reads_writes_and_streams(
    remote: str, connection: dict[str, str], store: Store, topic: str, tmp_path: Path
) -> None:
    """`open_session` opens the session that SPARK_REMOTE names, and what works by Spark works there."""
    copy = f"{topic}-copy"
    store.fill(topic, 20)
    store.make(copy)
    done = subprocess.run(
        [sys.executable, str(CLIENT), connection["url"], connection["prefix"], topic, copy, str(tmp_path)],
        env={"PATH": PATH, "PYTHONPATH": str(ROOT), "HOME": os.environ["HOME"], "SPARK_REMOTE": remote},
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen.pop("error").startswith("unknown option 'wrong'. Use one of url, ")
    assert seen == {
        "is_connect": True,
        "is_active_again": True,
        "numbers": sorted(int(fields[b"id"][1:]) for _, fields in store.entries(topic, 0)),
        "pushed": "true",
        "streamed": 20,
        "behind": 0,
    }
    assert store.count(copy) == 20


def test_command_by_spark_connect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands need more of Spark than Connect has, so they say what to set before they start anything."""
    with pytest.raises(ConfigError, match="unset SPARK_REMOTE, and give --master the address"), spark_session("sc://s"):
        pass
    monkeypatch.setenv("SPARK_REMOTE", "local[2]")
    for master in (None, "local[2]"):
        with pytest.raises(ConfigError, match="unset SPARK_REMOTE"), spark_session(master):
            pass


def test_session_of_connect_and_of_spark_at_once_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPARK_REMOTE and a master exclude each other, as PySpark says."""
    monkeypatch.setenv("SPARK_REMOTE", "sc://127.0.0.1:1")
    with pytest.raises(RsmqError, match=r"cannot be configured together: Spark master \[local\[2\]\]") as caught:
        start_session("local[2]", "rsmq", {})
    assert "\n" not in str(caught.value)


def test_missing_packages_of_connect_are_named() -> None:
    """`pyspark` alone has no gRPC: the error says how to get it."""
    with pytest.raises(ConfigError, match=r"grpcio .*pip install 'pyspark\[connect\]'"), spark_errors():
        raise PySparkImportError("grpcio >= 1.76.0 must be installed; however, it was not found.")
