"""What Java says at each start does not stand between a command and its answer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("pyspark", reason="needs the extra `spark`")

SAYS = """
import subprocess
from rsmq.pipeline.spark.session import without_noise

lines = [
    "WARNING: Using incubator modules: jdk.incubator.vector",
    "Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties",
    "26/11/22 18:01:11 WARN Utils: Your hostname, vm, resolves to a loopback address",
    "26/11/22 18:01:11 WARN NativeCodeLoader: Unable to load native-hadoop library",
    'Setting default log level to "WARN".',
    "26/11/22 18:01:11 ERROR Executor: the disk is full",
]
with without_noise():
    child = subprocess.Popen(["sh", "-c", 'printf "%s\\n" "$@" >&2; read go; echo late >&2', "sh", *lines],
                             stdin=subprocess.PIPE)
import sys
print("own", file=sys.stderr, flush=True)
child.communicate(b"go\\n")
import threading
for thread in threading.enumerate():
    if thread.name == "rsmq-java":
        thread.join(60)
"""


def test_noise_is_left_out_and_errors_are_passed_on() -> None:
    """Also those of a Java that outlives its start; what this process itself says is not touched."""
    done = subprocess.run(
        [sys.executable, "-c", SAYS], env=os.environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stderr.splitlines()) == ["26/11/22 18:01:11 ERROR Executor: the disk is full", "late", "own"]
