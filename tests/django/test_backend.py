"""The backend of Django's tasks, in a project of its own: Django can be configured only once per process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rsmq import Settings
from rsmq.redis.embedded.keeper import dies_with_us

pytest.importorskip("django")

ROOT = Path(__file__).parents[2]
PROJECT = Path(__file__).parent / "project"


@pytest.fixture
def environment(settings: Settings, tmp_path: Path) -> dict[str, str]:
    """What the project's settings read."""
    return {
        **os.environ, "PROJECT_DIR": str(tmp_path), "PROJECT_URL": str(settings.url), "PYTHONPATH": str(ROOT),
        "PROJECT_PREFIX": settings.prefix, "DJANGO_SETTINGS_MODULE": "settings",
    }  # fmt: skip


def run(environment: dict[str, str], *args: str, cwd: Path = PROJECT) -> subprocess.CompletedProcess[str]:
    """Run Python in the project. It ends with this process."""
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=environment, capture_output=True, text=True, timeout=250, check=False,
        preexec_fn=dies_with_us(),
    )  # fmt: skip


def test_tasks_in_a_project(environment: dict[str, str]) -> None:
    """The tests of backend_checks.py pass."""
    code = "import django, pytest, sys; django.setup(); sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "--rootdir", str(PROJECT)]
    done = run(environment, "-c", code, *options, "backend_checks.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_manage_rsmq_runs_commands_on_the_server_of_the_project(environment: dict[str, str]) -> None:
    """With its server and its prefix, from another directory. The errors are tested in backend_checks.py."""
    environment["PROJECT_TASKS"] = "{'default': TASKS['default']}"
    done = run(environment, str(PROJECT / "manage.py"), "rsmq", "topic", "list", "--json", cwd=Path("/"))
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_rsmq_without_the_extra_does_not_import_django() -> None:
    """It costs nothing where it is not used."""
    code = "import sys, rsmq; rsmq.SyncBroker; import rsmq.cli.worker; print('django' in sys.modules)"
    assert run(dict(os.environ), "-c", code, cwd=ROOT).stdout == "False\n"
