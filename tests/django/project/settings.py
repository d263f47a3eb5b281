"""The settings of a Django project, as small as possible."""

import json
import os
from pathlib import Path

from sealing import codecs
from tenacity import wait_fixed

from rsmq import RetryPolicy

SECRET_KEY = "of a test"
USE_TZ = os.environ.get("PROJECT_USE_TZ", "1") == "1"
TIME_ZONE = "Europe/Berlin"
SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": Path(os.environ["PROJECT_DIR"], "db.sqlite3")}
DATABASES = {"default": json.loads(os.environ.get("PROJECT_DATABASE", "{}")) or SQLITE}
INSTALLED_APPS = ["rsmq.django", "rsmq.django.database", "billing"]
BACKEND = "rsmq.django.RsmqBackend"
SERVER = {"url": os.environ["PROJECT_URL"], "prefix": os.environ["PROJECT_PREFIX"], "preflight": "warn"}
SERVER |= {"partitions": 2, "presence_interval": "100ms", "presence_grace": "300ms", "delay_resolution": "20ms"}
TASKS = {
    "default": {"BACKEND": BACKEND, "QUEUES": ["default", "mail"], "OPTIONS": {**SERVER, "concurrency": 1}},
    "outbox": {"BACKEND": BACKEND, "OPTIONS": {**SERVER, "topic": "boxed", "outbox": True, "codecs": codecs}},
    "deadly": {
        "BACKEND": BACKEND,
        "OPTIONS": {
            **SERVER, "topic": "deadly", "on_commit": False, "retry": RetryPolicy(max_attempts=1), "concurrency": 2,
        },
    },
    "retrying": {
        "BACKEND": BACKEND,
        "OPTIONS": {
            **SERVER, "topic": "retrying", "on_commit": False, "retry": RetryPolicy(max_attempts=3, wait=wait_fixed(0)),
            "concurrency": 2, "codecs": "sealing.codecs",
        },
    },
}  # fmt: skip
if "PROJECT_TASKS" in os.environ:  # a mistake
    TASKS = eval(os.environ["PROJECT_TASKS"])
