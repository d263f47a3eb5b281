"""The tasks of the project. What they do is noted in a file, a line for each."""

import os
import signal
import threading
import time
from pathlib import Path

from django.db import connection

from rsmq.django.tasks import task

NOTES = Path(os.environ["PROJECT_DIR"], "notes")
RELEASED = Path(os.environ["PROJECT_DIR"], "released")


def note(text):
    with NOTES.open("a") as file:
        file.write(f"{text}\n")


@task
def add(a, b=1):
    return a + b


@task
async def add_later(a, b):
    return a + b


@task(queue_name="mail")
def mail(to):
    note(f"mail to {to}")


@task(takes_context=True)
def count(context, *, until):
    note(f"attempt {context.attempt}")
    if context.attempt < until:
        raise ValueError(f"attempt {context.attempt}")
    return context.attempt


@task
def fail():
    raise LookupError("no such customer")


@task
def leave():
    raise SystemExit(ValueError("the till is closed"))


@task
def unserializable():
    return object()


@task
def keep_set(value):
    return {value}


@task
def wait(name):
    """Runs until the test releases it."""
    note(name)
    while not RELEASED.exists():
        time.sleep(0.01)
    return name


@task
def die():
    os.kill(os.getpid(), signal.SIGKILL)


@task
def query():
    """Whether this thread had a connection before, and which thread it is."""
    had_one = connection.connection is not None
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    return [had_one, threading.get_ident()]
