"""One cell of the matrix: runs the contract suite in its own process and counts the results."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from xml.etree import ElementTree

from tests.matrix.way import BREAKING, WAY
from tests.servers import binary

ROOT: Final = Path(__file__).parents[2]
LONGEST: Final = 900
"""Seconds that a cell may take."""
KINDS: Final = {"Redis 8.2": "redis-8.2", "Valkey 8.1": "valkey-8.1", "Valkey 9.1": "valkey-9.1"}
DEBIAN: Final = "Redis 7.0"
WITHOUT_WAY: Final = ("test_guarantees", "test_conditions", "test_simulation")
"""They use no server or their own one, so the way does not matter. `make test` runs them ..."""
RUN_WITH: Final = ("test_conditions", "tcp")
"""... but for these the server matters, so they run with one way."""
FAULTS: Final = {
    "Redis Cluster: faults under load": "tests/cluster/test_faults.py",
    "Sentinel: failover under load": "tests/sentinel/test_failover.py",
}
"""Further suites for a cluster and for Sentinel, in their long form."""
PATHS: Final = ("/usr/bin/redis-server", "/usr/local/bin/redis-server")


@dataclass
class Result:
    """The result of a cell. `failed`: the names of tests; `trouble`: why there is no result; `measured`: the day."""

    server: str
    way: str
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    trouble: str = ""
    measured: str = ""

    @property
    def total(self) -> int:
        """Tests that were run."""
        return self.passed + len(self.failed)

    def __str__(self) -> str:
        return self.trouble or f"{self.passed}/{self.total}"


def executable(server: str) -> Path | None:
    """The server's executable, if this machine has it. Redis 7.0: `REDIS_7_0`, or Debian's."""
    if server != DEBIAN:
        return binary(KINDS[server])  # type: ignore[arg-type]
    named = os.environ.get("REDIS_7_0")
    return next((Path(path) for path in (named, *PATHS) if path and Path(path).exists()), None)


def version(program: Path) -> str:
    """The version that the program prints, such as `Valkey 9.1.2`."""
    words = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()
    return f"{words[0]} {next(word[2:] for word in words if word.startswith('v='))}"


def run(server: str, way: str, arguments: list[str]) -> Result:
    """Run the suite on one server over one way. A failing suite does not raise."""
    result = Result(server, way)
    program = executable(server)
    if program is None:
        result.trouble = "not on this machine"
        return result
    with TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "-p", "no:cacheprovider", *suite(way)]
        environment = (
            os.environ | {"SERVER_BINARY": str(program)} | ({"CHAOS": "long"} if way in FAULTS else {WAY: way})
        )
        log = ROOT / ".matrix" / f"{server} {way}.log".replace(" ", "-").replace(":", "")
        log.parent.mkdir(exist_ok=True)
        try:
            with log.open("w") as file:
                subprocess.run(
                    command + arguments, cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=LONGEST
                )
            read(result, report)
        except subprocess.TimeoutExpired:
            result.trouble = f"not finished after {LONGEST} s"
        except (OSError, ElementTree.ParseError) as error:
            result.trouble = f"no report: {error}"
    return result


def suite(way: str) -> list[str]:
    """The arguments of pytest."""
    if way in FAULTS:
        return [FAULTS[way]]
    again = ("--reruns", "3", "--only-rerun", "BrokerUnavailable") if way in BREAKING else ()
    ignored = (f"--ignore=tests/contract/{name}.py" for name in WITHOUT_WAY if (name, way) != RUN_WITH)
    # two processes, each with its own server; a longer timeout, because they share the machine
    return ["tests/contract", "-n", "2", "--dist", "loadgroup", "--timeout=400", *again, *ignored]


def read(result: Result, report: Path) -> None:
    """Count the test cases of the report. One that was run again is there several times, in the order of its runs."""
    ends: dict[str, ElementTree.Element] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        result.seconds += float(case.get("time", 0))
        ends[f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"] = case
    for name, case in ends.items():
        if case.find("skipped") is not None:
            continue
        if case.find("failure") is None and case.find("error") is None:
            result.passed += 1
        else:
            result.failed.append(name)
