"""Forked processes of tests behave like those that are started with `python -m`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from tests import forks
from tests.servers import wait_until

MODULE = "tests.testing.forked"
GIVEN = {"GIVEN": "ü", "PYTHONPATH": str(forks.ROOT)}


@pytest.mark.parametrize("ending", ["0", "3", "raise"])
def test_forked_process_ends_as_a_started_one(ending: str, tmp_path: Path) -> None:
    """The same arguments, environment, directory, output and exit code; a traceback on standard error."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        process = forks.start(MODULE, ending, "more", cwd=tmp_path, env=GIVEN, stdout=out, stderr=err)
        code = process.wait(60)
        out.seek(0)
        err.seek(0)
        printed, errors = out.read(), err.read()
    started = subprocess.run(
        [sys.executable, "-m", MODULE, ending, "more"], cwd=tmp_path, env=GIVEN, capture_output=True, text=True,
        check=False, start_new_session=True,
    )  # fmt: skip
    assert (code, json.loads(printed)) == (started.returncode, json.loads(started.stdout))
    assert ("ValueError: on purpose" in errors) == ("ValueError" in started.stderr) == (ending == "raise")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_forked_process_is_ended_by_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    """The exit code says which; another process of the same server goes on until it is killed."""
    with TemporaryFile("w+") as out:
        first, second = (forks.start(MODULE, "wait", cwd=tmp_path, env=GIVEN, stdout=out) for _ in range(2))
        wait_until(lambda: os.fstat(out.fileno()).st_size and first.poll() is None, "they run")
        wait_until(lambda: os.pread(out.fileno(), 1 << 16, 0).count(b"\n") >= 2, "both have begun")
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(0.01)
        first.send_signal(number)
        assert first.wait(60) == -number
        assert second.poll() is None
        second.kill()
        assert second.wait(60) == -signal.SIGKILL
        first.kill()  # nothing: it has ended
