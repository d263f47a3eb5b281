"""The command `rsmq`: a file a noun, each only a thin skin over the library.

Exit codes: 0 done, 1 failed or a negative answer, 2 wrong use or configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Annotated

import typer

from rsmq.cli import device, dlq, group, member, pipeline, schedule, topic
from rsmq.cli.bench import bench
from rsmq.cli.dashboard import dashboard
from rsmq.cli.doctor import doctor
from rsmq.cli.exporter import exporter
from rsmq.cli.printer import complain
from rsmq.cli.publish import publish
from rsmq.cli.server import server
from rsmq.cli.tail import tail
from rsmq.cli.top import top
from rsmq.cli.worker import worker
from rsmq.errors import ConfigError, RsmqError
from rsmq.inspector import installed

app = typer.Typer(
    help="A message queue on Redis Streams: run workers, publish, look, repair.",
    epilog="Exit codes: 0 done, 1 failed or a negative answer, 2 wrong use or configuration.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

COMMANDS: dict[Callable[..., None], str] = {
    worker: "rsmq worker app:broker --processes 4",
    server: "rsmq server",
    publish: """rsmq publish orders '{"n": 1}' --key c-42 --delay PT5S""",
    tail: "rsmq tail orders -n 20 --follow",
    top: "rsmq top orders --every PT0.5S",
    dashboard: "rsmq dashboard --port 8642",
    doctor: "rsmq doctor --url redis://localhost:6379/0",
    exporter: "rsmq exporter --listen 127.0.0.1:9101",
    bench: "rsmq bench --messages 20000 --payload 1000",
}
for command, example in COMMANDS.items():
    app.command(epilog=f"Example: {example}")(command)
NOUNS = {
    "topic": topic, "group": group, "member": member, "dlq": dlq, "device": device, "schedule": schedule,
    "pipeline": pipeline,
}  # fmt: skip
for name, noun in NOUNS.items():
    app.add_typer(noun.app, name=name)


def add_demo() -> None:
    """`rsmq demo`, where it is installed."""
    try:
        demo = import_module("rsmq.demo.command").demo
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("rsmq.demo"):
            raise
    else:
        app.command(epilog="Example: rsmq demo --all")(demo)


add_demo()


def show_version(wanted: bool) -> None:
    """Print it and leave."""
    if wanted:
        typer.echo(f"rsmq {installed('rsmq')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A message queue on Redis Streams: run workers, publish, look, repair."""


def main() -> None:
    """Run the command line. A mistake of the user, or a server that is away, is a line on stderr, not a traceback."""
    try:
        app(prog_name="rsmq")
    except RsmqError as error:
        sys.exit(report([error]))
    except BaseExceptionGroup as group:
        if group.split(RsmqError)[1] is not None:
            raise
        sys.exit(report(leaves(group)))


def report(errors: list[BaseException]) -> int:
    """Print errors, each once, and return the exit code."""
    for text in dict.fromkeys(map(str, errors)):
        complain(text)
    return 2 if any(isinstance(error, ConfigError) for error in errors) else 1


def leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The errors inside a group of groups."""
    return list(walk(group))


def walk(error: BaseException) -> Iterator[BaseException]:
    """The errors inside one."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from walk(inner)
    else:
        yield error
