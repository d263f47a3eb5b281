"""Tests that users wrote with the harness of one release pass with that of another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.release import NEW, Release, earlier_release


@pytest.mark.chaos
@pytest.mark.parametrize(
    "is_upgrade", [True, pytest.param(False, marks=pytest.mark.long_chaos("seconds"))], ids=["upgrade", "back"]
)
def test_application_of_one_release_passes_its_tests_with_the_other(tmp_path: Path, *, is_upgrade: bool) -> None:
    """What `rsmq new` has written, with tests on the harness and the plugin: after an upgrade, and on the way back."""
    old = earlier_release()
    written_by, tested_with = (old, NEW) if is_upgrade else (NEW, old)
    run(written_by, tmp_path, "rsmq", "new", "shop")
    says = run(tested_with, tmp_path / "shop", "pytest", "-q", "-p", "no:asyncio", "-p", "no:cacheprovider")
    assert " passed" in says
    where = "import rsmq, pytest_rsmq, rsmq.testing; print(rsmq.testing.__file__, pytest_rsmq.__file__)"
    found = subprocess.check_output([sys.executable, "-c", where], env=environment(tested_with), text=True)
    assert found.split() == [f"{tested_with.site}/rsmq/testing/__init__.py", f"{tested_with.site}/pytest_rsmq.py"]


def run(release: Release, folder: Path, *command: str) -> str:
    """What a program of a release prints."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment(release), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(release: Release) -> dict[str, str]:
    """The variables that its processes get."""
    return {**os.environ, **release.environment}
