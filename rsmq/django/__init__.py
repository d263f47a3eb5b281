"""rsmq as a backend of Django's tasks (`django.tasks`, or its backport `django-tasks` before Django 6).

`TASKS = {"default": {"BACKEND": "rsmq.django.RsmqBackend"}}`, and "rsmq.django" in INSTALLED_APPS for
`manage.py rsmq worker`. `backend` enqueues, `result` is what is stored of a task, `worker` runs tasks, `options` reads
the settings, and `tasks` takes the names from Django or the backport.
"""

from rsmq.django.backend import RsmqBackend

__all__ = ["RsmqBackend"]
