"""The operation of a migration that creates the tables of `rsmq.sql`."""

from __future__ import annotations

from typing import Any

from django.db import router
from django.db.migrations.operations.base import Operation

from rsmq.django.database.connection import dialect_of
from rsmq.sql.tables import dropping, statements


class CreateTables(Operation):
    """Creates those that do not exist. `manage.py sqlmigrate rsmq_database 0001` shows the statements.

    A database router chooses the databases (`allow_migrate` of the app `rsmq_database`); all databases have them else.
    """

    reversible = True

    def state_forwards(self, app_label: str, state: Any) -> None:
        """There are no models."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Create the tables."""
        self._run(app_label, schema_editor, statements)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Drop the tables."""
        self._run(app_label, schema_editor, dropping)

    def _run(self, app_label: str, schema_editor: Any, made: Any) -> None:
        wrapper = schema_editor.connection
        if router.allow_migrate(wrapper.alias, app_label):
            for statement in made(dialect_of(wrapper)):
                schema_editor.execute(statement)

    def describe(self) -> str:
        """For `manage.py migrate --plan`."""
        return "Create the tables of rsmq for effects and the outbox"
