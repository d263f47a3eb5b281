"""The Django application: it brings `manage.py rsmq` and the system checks."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from django.apps import AppConfig, apps
from django.core import checks

from rsmq.django.backend import RsmqBackend
from rsmq.django.connections import DjangoConnections
from rsmq.django.tasks import task_backends
from rsmq.handler.surroundings import register


class RsmqConfig(AppConfig):
    """`"rsmq.django"` in INSTALLED_APPS. It has no models."""

    name = "rsmq.django"
    label = "rsmq"
    verbose_name = "rsmq"

    def ready(self) -> None:
        """Check that a backend is there; those of Django check each backend. Look after connections around messages."""
        checks.register(check_backends)
        register(DjangoConnections())


def check_backends(**_: Any) -> list[checks.CheckMessage]:
    """The application is installed, so a backend should be. The backport checks backends only where it is installed."""
    ours = [each for alias in task_backends if isinstance(each := task_backends[alias], RsmqBackend)]
    if ours:
        is_checked = find_spec("django.tasks") is not None or apps.is_installed("django_tasks")
        return [] if is_checked else [message for backend in ours for message in backend.check()]
    return [
        checks.Warning(
            "'rsmq.django' is installed, but TASKS has no backend of rsmq",
            hint="Write TASKS = {'default': {'BACKEND': 'rsmq.django.RsmqBackend'}}.",
            id="rsmq.W002",
        )
    ]
