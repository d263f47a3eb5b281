"""The Django application: it has no models, only the migration that creates the tables."""

from __future__ import annotations

from django.apps import AppConfig


class DatabaseConfig(AppConfig):
    """`"rsmq.django.database"` in INSTALLED_APPS."""

    name = "rsmq.django.database"
    label = "rsmq_database"
    verbose_name = "rsmq: tables for effects and the outbox"
