"""Secrets planted in a Django project, on PostgreSQL and on SQLite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rsmq import Settings
from tests.django.projects import environment_of, run_checks
from tests.sql.databases import Postgres

pytest.importorskip("django")


@pytest.mark.parametrize("vendor", ["postgresql", "sqlite"])
def test_no_error_or_log_of_a_project_shows_a_secret(settings: Settings, tmp_path: Path, vendor: str) -> None:
    """The tests of planted_checks.py pass."""
    environment = environment_of(settings, tmp_path)
    if vendor == "sqlite":
        run_checks(environment, "planted_checks.py")
        return
    with Postgres() as postgres:
        url = postgres.url("psycopg", postgres.new_database())
        database = {"ENGINE": "django.db.backends.postgresql", "NAME": url.database, "USER": url.username,
                    "HOST": url.query["host"]}  # fmt: skip
        run_checks({**environment, "PROJECT_DATABASE": json.dumps(database)}, "planted_checks.py", "-k", "constraint")
