"""The command `rsmq`: thin commands over the library, a file for each noun.

`parameters.py` has shared options and the parsers of their values, `connection.py` asks the server, and `output.py`
prints lines, tables, JSON and the log. `top_screen.py` draws `rsmq top`. `load_broker.py` loads a worker's broker and
`serve.py` runs it.

Exit codes: 0 done, 1 failed or a negative answer, 2 wrong use or configuration.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated

import typer

from rsmq.cli import (
    client,
    device,
    dlq,
    group,
    member,
    message,
    outbox,
    pipeline,
    retained,
    schedule,
    schema,
    sql,
    topic,
)
from rsmq.cli.bench.command import bench
from rsmq.cli.dashboard import dashboard
from rsmq.cli.docs import docs
from rsmq.cli.doctor import doctor
from rsmq.cli.exporter import exporter
from rsmq.cli.gateway import gateway
from rsmq.cli.output import exit_code, leaves, print_error, printable
from rsmq.cli.publish import publish
from rsmq.cli.server import server
from rsmq.cli.tail import tail
from rsmq.cli.top import top
from rsmq.cli.worker import worker
from rsmq.errors import ConfigError, RsmqError
from rsmq.inspector.inspector import installed

app = typer.Typer(
    help="A message queue on Redis Streams: run workers, publish, watch, repair.",
    epilog="Exit codes: 0 done, 1 failed or a negative answer, 2 wrong use or configuration.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

COMMANDS: dict[Callable[..., None], str] = {
    worker: "rsmq worker app:broker --processes 4",
    gateway: "rsmq gateway app:broker --listen mqtt://0.0.0.0:1883 --password-file passwords",
    server: "rsmq server",
    publish: """rsmq publish orders '{"n": 1}' --key c-42 --delay 5s""",
    tail: "rsmq tail orders -n 20 --follow",
    message.trace: "rsmq trace 01980000-0000-7000-8000-000000000000 --topic orders --key c-42",
    top: "rsmq top orders --every 500ms",
    dashboard: "rsmq dashboard --port 8642",
    doctor: "rsmq doctor --url redis://localhost:6379/0",
    docs: "rsmq docs app:broker --check asyncapi.json",
    exporter: "rsmq exporter --listen 127.0.0.1:9101",
    bench: "rsmq bench --messages 20000 --payload 1000 --partitions 16",
}
for command, example in COMMANDS.items():
    app.command(epilog=f"Example: {example}")(command)
NOUNS = {
    "topic": topic, "group": group, "member": member, "dlq": dlq, "device": device, "schedule": schedule,
    "schema": schema, "pipeline": pipeline, "sql": sql, "outbox": outbox, "client": client, "retained": retained,
    "message": message,
}  # fmt: skip
for name, noun in NOUNS.items():
    app.add_typer(noun.app, name=name)


def add_demo() -> None:
    """Add `rsmq demo` if it is installed."""
    try:
        demo = import_module("rsmq.cli.demo.command").demo
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("rsmq.cli.demo"):
            raise
    else:
        app.command(epilog="Example: rsmq demo --all")(demo)


add_demo()


def show_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        typer.echo(f"rsmq {installed('rsmq')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A message queue on Redis Streams: run workers, publish, watch, repair."""


def main() -> None:
    """Run the command line. Wrong use, an unreachable server, a full disk or Ctrl-C is not a traceback."""
    if sys.stdout is None:  # closed by the caller
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        check_words(sys.argv)
        app(prog_name="rsmq")
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
