"""Alembic: a migration that it writes by itself creates the tables that effects and outbox expect."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Column, Engine, Integer, MetaData, Table, create_engine, inspect
from sqlalchemy.orm import Session

from rsmq.sql import Outbox, metadata, read_status
from rsmq.sql.mark import Mark
from rsmq.sql.marks import write_mark
from tests.sql.conftest import new_url

ENVIRONMENT = """
from alembic import context
from sqlalchemy import create_engine

import rsmq.sql

engine = create_engine(context.config.attributes["url"])
with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=[context.config.attributes["own"], rsmq.sql.metadata])
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
"""
REVISION = '''"""${message}"""
import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision, down_revision = ${repr(up_revision)}, ${repr(down_revision)}

def upgrade() -> None:
    ${upgrades}

def downgrade() -> None:
    ${downgrades}
'''
OWN = MetaData()
Table("invoice", OWN, Column("number", Integer, primary_key=True))


@pytest.fixture(params=["psycopg", "sqlite", "pymysql"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    """A service with migrations and an empty database of each kind."""
    scripts = tmp_path / "migrations"
    (scripts / "versions").mkdir(parents=True)
    (scripts / "env.py").write_text(ENVIRONMENT)
    (scripts / "script.py.mako").write_text(REVISION)
    config = Config()
    config.set_main_option("script_location", str(scripts))
    config.set_main_option("path_separator", "os")
    config.attributes.update(url=new_url(request.param, tmp_path, request), own=OWN)
    return config


def differences(engine: Engine) -> list[object]:
    """What the next migration would change."""
    with engine.connect() as connection:
        return list(compare_metadata(MigrationContext.configure(connection), [OWN, metadata]))


def test_generated_migration_creates_the_tables_that_effects_and_outbox_use(project: Config) -> None:
    """Up, used, nothing more to change, and down again."""
    engine = create_engine(project.attributes["url"])
    command.revision(project, "rsmq", autogenerate=True)
    command.upgrade(project, "head")
    assert differences(engine) == []
    with Session(engine) as session, session.begin():
        Outbox(engine).publish(session, "orders", {"n": 1}, key="Ada")
        write_mark(session.connection(), Mark("rsmq", "billing", "orders", 0, 5, 0, 0, "m1", 7))
    with engine.connect() as connection:
        assert read_status(connection, "rsmq").backlog == 1
    command.downgrade(project, "base")
    assert set(inspect(engine).get_table_names()) == {"alembic_version"}
    engine.dispose()
