"""`manage.py rsmq worker` and every other command of rsmq, with the server and the prefix of TASKS."""

from __future__ import annotations

import os
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from rsmq.django.backend import RsmqBackend
from rsmq.django.options import BackendOptions
from rsmq.django.tasks import task_backends
from rsmq.errors import ConfigError


class Command(BaseCommand):
    """Becomes the process of the command, so that signals and exit codes are those of `rsmq`."""

    help = "Run `rsmq worker` for the tasks of this project, or another command of rsmq on its server."

    def add_arguments(self, parser: CommandParser) -> None:
        """Only ours: the others belong to the command of rsmq."""
        parser.add_argument("--backend", help="The name in TASKS. Only needed if there are several of rsmq.")
        parser.add_argument("command", help="Such as worker, doctor, top or dlq.")

    def run_from_argv(self, argv: list[str]) -> None:
        """Split the arguments: `--backend NAME`, if it comes first, and those of the command."""
        rest = argv[2:]
        backend = None
        if rest[:1] == ["--backend"] and len(rest) > 1:
            backend, rest = rest[1], rest[2:]
        if not rest or rest[0] in ("-h", "--help"):
            self.print_help(argv[0], argv[1])
            return
        try:
            self.handle(*rest, backend=backend)
        except CommandError as error:
            self.stderr.write(f"{type(error).__name__}: {error}")
            sys.exit(error.returncode)

    def handle(self, *args: Any, backend: str | None = None, **_: Any) -> None:
        """Run the command."""
        alias, options = chosen(backend)
        command = [str(each) for each in args]
        if command[0] == "worker":
            command.insert(1, f"rsmq.django.worker:brokers.{alias}")
        os.environ["RSMQ_PREFIX"] = options.settings.prefix
        if options.settings.url is not None:
            os.environ["RSMQ_URL"] = options.settings.url
        path = [str(sys.path[0]), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)  # the project, from whichever directory manage.py is run
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "rsmq", *command])


def chosen(backend: str | None) -> tuple[str, BackendOptions]:
    """The backend's name in TASKS and its options."""
    found = {alias: each for alias in task_backends if isinstance(each := task_backends[alias], RsmqBackend)}
    if not found:
        raise CommandError("TASKS has no backend of rsmq: set its BACKEND to 'rsmq.django.RsmqBackend'")
    if backend is None and len(found) > 1:
        raise CommandError(f"TASKS has several backends of rsmq: write --backend with one of {', '.join(found)}")
    alias = next(iter(found)) if backend is None else backend
    if alias not in found:
        raise CommandError(f"TASKS has no backend of rsmq with the name {alias!r}: there is {', '.join(found)}")
    try:
        return alias, found[alias].configuration
    except ConfigError as error:
        raise CommandError(str(error)) from None
