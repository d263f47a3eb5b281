"""Effects and outbox in Django's transactions, on PostgreSQL and on SQLite."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rsmq import Settings
from tests.django.projects import environment_of, run_checks
from tests.sql.databases import Postgres

pytest.importorskip("django")


@pytest.mark.parametrize("vendor", ["postgresql", "sqlite"])
def test_effects_and_outbox_in_a_project(settings: Settings, tmp_path: Path, vendor: str) -> None:
    """The tests of database_checks.py pass; all of them on SQLite with CHAOS=long."""
    environment = environment_of(settings, tmp_path)
    if vendor == "sqlite":
        parts = () if os.environ.get("CHAOS") == "long" else ("-k", "migrations or each_message or task")
        run_checks(environment, "database_checks.py", *parts)
        return
    with Postgres() as postgres:
        url = postgres.url("psycopg", postgres.new_database())
        database = {"ENGINE": "django.db.backends.postgresql", "NAME": url.database, "USER": url.username,
                    "HOST": url.query["host"], "CONN_MAX_AGE": 60, "CONN_HEALTH_CHECKS": True}  # fmt: skip
        run_checks({**environment, "PROJECT_DATABASE": json.dumps(database)}, "database_checks.py")
