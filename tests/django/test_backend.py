"""The backend of Django's tasks, in a project of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rsmq import Settings
from tests.django.projects import PROJECT, ROOT, environment_of, run, run_checks

pytest.importorskip("django")


@pytest.fixture
def environment(settings: Settings, tmp_path: Path) -> dict[str, str]:
    """What the project's settings read."""
    return environment_of(settings, tmp_path)


def test_tasks_in_a_project(environment: dict[str, str]) -> None:
    """The tests of backend_checks.py pass."""
    run_checks(environment, "backend_checks.py")


def test_manage_rsmq_runs_commands_on_the_server_of_the_project(environment: dict[str, str]) -> None:
    """With its server and its prefix, from another directory. The errors are tested in backend_checks.py."""
    environment["PROJECT_TASKS"] = "{'default': TASKS['default']}"
    done = run(environment, str(PROJECT / "manage.py"), "rsmq", "topic", "list", "--json", cwd=Path("/"))
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_rsmq_without_the_extra_does_not_import_django() -> None:
    """It costs nothing where it is not used."""
    code = "import sys, rsmq; rsmq.SyncBroker; import rsmq.cli.worker; print('django' in sys.modules)"
    assert run(dict(os.environ), "-c", code, cwd=ROOT).stdout == "False\n"


def test_backend_is_imported_without_sqlalchemy() -> None:
    """The extra `django` alone does not install it."""
    code = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "import django; from django.conf import settings; settings.configure(); django.setup()\n"
        "import rsmq.django"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
