"""The command `rsmq`: thin commands over the library, a file for each noun.

`parameters.py` has shared options and the parsers of their values, `connection.py` asks the server, `output.py` prints
lines, JSON and the log, and `tables.py` prints tables. `top_screen.py` draws `rsmq top`. `load_broker.py` loads a
worker's broker and `serve.py` runs it. A command imports only what it needs itself.

Exit codes: 0 done, 1 failed or a negative answer, 2 wrong use or configuration.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pkgutil import resolve_name
from typing import Annotated, Final

import typer

from rsmq.cli.output import exit_code, leaves, print_error, printable
from rsmq.errors import ConfigError, RsmqError
from rsmq.model.words import installed

HELP: Final = "A message queue on Redis Streams: run workers, publish, watch, repair."
COMMANDS: Final = {
    "rsmq.cli.worker:worker": "rsmq worker app:broker --processes 4",
    "rsmq.cli.gateway:gateway":
        "rsmq gateway app:broker --listen mqtt://0.0.0.0:1883 --password-file passwords",
    "rsmq.cli.server:server": "rsmq server",
    "rsmq.cli.publish:publish": """rsmq publish orders '{"n": 1}' --key c-42 --delay 5s""",
    "rsmq.cli.tail:tail": "rsmq tail orders -n 20 --follow",
    "rsmq.cli.message:trace": "rsmq trace 01980000-0000-7000-8000-000000000000 --topic orders --key c-42",
    "rsmq.cli.top:top": "rsmq top orders --every 500ms",
    "rsmq.cli.dashboard:dashboard": "rsmq dashboard --port 8642",
    "rsmq.cli.doctor:doctor": "rsmq doctor --url redis://localhost:6379/0",
    "rsmq.cli.docs:docs": "rsmq docs app:broker --check asyncapi.json",
    "rsmq.cli.exporter:exporter": "rsmq exporter --listen 127.0.0.1:9101",
    "rsmq.cli.bench.command:bench": "rsmq bench --messages 20000 --payload 1000 --partitions 16",
    "rsmq.cli.demo.command:demo": "rsmq demo --all",
}  # fmt: skip
"""Where each command is, and an example."""
NOUNS: Final = (
    "topic", "group", "member", "dlq", "device", "schedule", "schema", "pipeline", "sql", "outbox", "client",
    "retained", "message",
)  # fmt: skip


def make_app(word: str | None = None) -> typer.Typer:
    """The command line, or as much of it as one command needs: a worker has no use for the imports of all others."""
    app = typer.Typer(
        help=HELP,
        epilog="Exit codes: 0 done, 1 failed or a negative answer, 2 wrong use or configuration.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(options)
    commands = {import_path.partition(":")[2]: import_path for import_path in COMMANDS}
    is_one = word in commands or word in NOUNS
    for name, import_path in commands.items():
        if not is_one or name == word:
            add_command(app, import_path)
    for name in NOUNS:
        if not is_one or name == word:
            app.add_typer(import_module(f"rsmq.cli.{name}").app, name=name)
    return app


def add_command(app: typer.Typer, import_path: str) -> None:
    """Add a command. The demo may not be installed."""
    try:
        command: Callable[..., None] = resolve_name(import_path)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("rsmq.cli.demo"):
            raise
    else:
        app.command(epilog=f"Example: {COMMANDS[import_path]}")(command)


def show_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        typer.echo(f"rsmq {installed('rsmq')}")
        raise typer.Exit


def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The options before a command."""


def main() -> None:
    """Run the command line. Wrong use, an unreachable server, a full disk or Ctrl-C is not a traceback."""
    if sys.stdout is None:  # closed by the caller
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        check_words(sys.argv)
        make_app(sys.argv[1] if len(sys.argv) > 1 else None)(prog_name="rsmq")
    except RsmqError as error:
        sys.exit(report(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BaseExceptionGroup as group:
        if group.split(RsmqError)[1] is not None:
            raise
        sys.exit(report(group))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer would fail again at the exit
        sys.exit(report(RsmqError(f"cannot write: {error.strerror}")))


def check_words(words: list[str]) -> None:
    """Raise ConfigError for an argument that is not UTF-8: no name, key or payload can be."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the argument {printable(word)} is not UTF-8") from None


def report(error: BaseException) -> int:
    """Print an error, or each of a group once, and return the exit code."""
    for text in dict.fromkeys(map(str, leaves(error))):
        print_error(text)
    return exit_code(error)
