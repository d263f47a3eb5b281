"""Runs Python in the Django project of the tests: Django can be configured only once per process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rsmq import Settings
from rsmq.redis.embedded.keeper import dies_with_us

ROOT = Path(__file__).parents[2]
PROJECT = Path(__file__).parent / "project"


def environment_of(settings: Settings, path: Path) -> dict[str, str]:
    """What the project's settings read."""
    return {
        **os.environ, "PROJECT_DIR": str(path), "PROJECT_URL": str(settings.url), "PYTHONPATH": str(ROOT),
        "PROJECT_PREFIX": settings.prefix, "DJANGO_SETTINGS_MODULE": "settings",
    }  # fmt: skip


def run(environment: dict[str, str], *args: str, cwd: Path = PROJECT) -> subprocess.CompletedProcess[str]:
    """Run Python in the project. It ends with this process."""
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=environment, capture_output=True, text=True, timeout=250, check=False,
        preexec_fn=dies_with_us(),
    )  # fmt: skip


def run_checks(environment: dict[str, str], *names: str) -> None:
    """Run tests of the project, and fail with what they print."""
    code = "import django, pytest, sys; django.setup(); sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-x", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "--rootdir", str(PROJECT)]
    done = run(environment, "-c", code, *options, *names)
    assert done.returncode == 0, done.stdout + done.stderr
