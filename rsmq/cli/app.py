"""The command line as typer runs it: of all commands, of one, or of the index where that is enough."""

from __future__ import annotations

import codecs
import errno
import io
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pkgutil import resolve_name
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from rsmq.cli import index
from rsmq.cli.failure import exit_code, leaves, print_error
from rsmq.cli.quick import completed_words
from rsmq.errors import ConfigError, RsmqError
from rsmq.model.extension import Extension, extensions
from rsmq.model.interrupt import mark
from rsmq.model.own_process import own_version
from rsmq.model.words import printable

HELP: Final = "A message queue on Redis Streams: run workers, publish, watch, repair."
COMMANDS: Final = {
    "worker": "rsmq.cli.worker:worker", "server": "rsmq.cli.server:server", "publish": "rsmq.cli.publish:publish",
    "tail": "rsmq.cli.tail:tail", "trace": "rsmq.cli.message:trace", "top": "rsmq.cli.top:top",
    "doctor": "rsmq.cli.doctor:doctor", "docs": "rsmq.cli.docs:docs", "exporter": "rsmq.cli.exporter:exporter",
    "bench": "rsmq.cli.bench.command:bench", "demo": "rsmq.cli.demo.command:demo",
    "topic": "rsmq.cli.topic:app", "group": "rsmq.cli.group:app", "member": "rsmq.cli.member:app",
    "hold": "rsmq.cli.hold:app", "keys": "rsmq.cli.keys:app", "bodies": "rsmq.cli.bodies:app",
    "erase": "rsmq.cli.erase:erase",
    "dlq": "rsmq.cli.dlq:app", "device": "rsmq.cli.device:app", "schedule": "rsmq.cli.schedule:app",
    "schema": "rsmq.cli.schema:app", "batch": "rsmq.cli.batch:app",
    "message": "rsmq.cli.message:app", "new": "rsmq.cli.new:new",
}  # fmt: skip
"""Where each command, or noun with commands, is. Those of extras and other distributions are entry points."""


class ReaderLeft(Exception):
    """The program that reads stdout, such as `head`, has ended: it wants no more."""


class CommandLine(TyperGroup):
    """The commands. Each ends when nothing reads its output any more."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Read the words of the command line. Prints the help."""
        with until_reader_leaves():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and write what is left in the buffer."""
        with until_reader_leaves():
            result = super().invoke(ctx)
            sys.stdout.flush()
        return result


@contextmanager
def until_reader_leaves() -> Iterator[None]:
    """Raise ReaderLeft for a write that failed because the reader of stdout has left, also in a task."""
    try:
        yield
    except (BrokenPipeError, BaseExceptionGroup) as error:
        if any(isinstance(each, BrokenPipeError) for each in leaves(error)) and is_reader_gone():
            raise ReaderLeft from error
        raise


def is_reader_gone() -> bool:
    """Whether the other end of the pipe behind stdout is closed."""
    poll = select.poll()
    try:
        poll.register(1, 0)
    except OSError:
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


@cache
def added() -> dict[str, Extension]:
    """The commands that entry points add, by name. None has the name of one of COMMANDS."""
    return {each.name: each for each in extensions("rsmq.commands") if each.name not in COMMANDS}


def known() -> tuple[str, ...]:
    """The names of all commands and nouns."""
    return (*COMMANDS, *added())


def make_app(word: str | None = None) -> typer.Typer:
    """The command line, or as much of it as one command needs: a worker has no use for the imports of all others."""
    app = bare_app()
    for name in known() if word is None else (word,):
        add(app, name, is_alone=word is not None)
    return app


def bare_app() -> typer.Typer:
    """The command line without a command."""
    app = typer.Typer(
        cls=CommandLine,
        help=HELP,
        epilog="Exit codes: 0 done, 1 failed or a negative answer, 2 wrong use or configuration.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(options)
    return app


def add(app: typer.Typer, name: str, *, is_alone: bool) -> None:
    """Add a command. Without its packages it is left out among the others, and alone it says what is missing."""
    try:
        found: Any = resolve_name(COMMANDS[name]) if name in COMMANDS else added()[name].load()
    except (ModuleNotFoundError, ConfigError) as error:
        if is_alone or not is_missing(error):
            raise
        return
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=name)
    else:
        app.command(name, epilog=epilog(found))(found)


def epilog(command: Callable[..., None]) -> str | None:
    """The last line of the help of a command that was imported."""
    line = import_module("rsmq.cli.parameters").EXAMPLES.get((command.__module__, command.__qualname__))
    return None if line is None else f"Example: {line}"


def is_missing(error: Exception) -> bool:
    """Whether something is not installed that not every installation has: an extra, or the demo."""
    return isinstance(error, ConfigError) or (getattr(error, "name", None) or "").startswith("rsmq.cli.demo")


def app_for(words: Sequence[str]) -> typer.Typer:
    """As much of the command line as these words need. Help of more than one command is that of the index."""
    word = words[0] if words else ""
    entry = index.top(word)
    if entry is not None and "commands" in entry and words[1:] in ([], ["--help"]):
        app = bare_app()
        add_entry(app, word, entry)
        return app
    if word in COMMANDS or word in added():
        return make_app(word)
    app = bare_app()
    for name in known():
        add_entry(app, name, index.top(name) or {"help": f"From {added()[name].distribution}."})
    return app


def add_entry(app: typer.Typer, name: str, entry: index.Entry) -> None:
    """Add a command or noun that has a name and help, and does nothing."""
    if "commands" not in entry:
        app.command(name, help=entry["help"])(nothing)
        return
    noun = typer.Typer(help=entry["help"], no_args_is_help=True, rich_markup_mode=None)
    for each, inner in entry["commands"].items():
        noun.command(each, help=inner["help"])(nothing)
    app.add_typer(noun, name=name)


def nothing() -> None:
    """It is listed, and never called."""


def show_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        typer.echo(f"rsmq {own_version()}")
        raise typer.Exit


def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The options before a command."""


def main() -> None:
    """Run the command line. Wrong use, an unreachable server, a full disk or Ctrl-C is not a traceback."""
    open_standard_streams()
    print_everything()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminate)
    try:
        check_words(sys.argv)
        words = completed_words(os.environ)
        app = app_for(sys.argv[1:]) if words is None else make_app(words[0] if words[0] in known() else None)
        app(prog_name="rsmq")
    except ReaderLeft:
        drop_output()
        sys.exit(0)
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
        drop_output()
        sys.exit(report(RsmqError(f"cannot write: {error.strerror}")))


def drop_output() -> None:
    """What is left in the buffer of stdout would fail again at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def open_standard_streams() -> None:
    """Open what the caller has closed: the next file or socket would get its number, and what others write there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.dup2(devnull := os.open(os.devnull, os.O_RDWR), number)
                if devnull != number:
                    os.close(devnull)
            mode = "w" if number else "r"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open as long as it runs


def print_everything() -> None:
    """Let stdout write what its encoding does not have, such as an emoji in Latin-1, as JSON does: by its number.

    ASCII of the locale C was not chosen: there it is UTF-8.
    """
    codecs.register_error("as-json", escaped)
    if isinstance(sys.stdout, io.TextIOWrapper):
        if sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="as-json")
        elif codecs.lookup(sys.stdout.encoding).name == "ascii":
            sys.stdout.reconfigure(encoding="utf-8")


def escaped(error: UnicodeError) -> tuple[str, int]:
    """What cannot be encoded, as escapes."""
    assert isinstance(error, UnicodeEncodeError)
    data = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{data[at]:02x}{data[at + 1]:02x}" for at in range(0, len(data), 2)), error.end


def terminate(number: int, _frame: object) -> None:
    """End as after Ctrl-C: connections are closed, and the embedded server is released."""
    raise mark(SystemExit(128 + number), number)


def check_words(words: list[str]) -> None:
    """Raise ConfigError for an argument that is not UTF-8: no name, key or payload can be.

    In a C locale, Python does not read UTF-8 as such: those arguments are replaced.
    """
    for at, word in enumerate(words):
        try:
            words[at] = word if word.isascii() or not has_surrogates(word) else os.fsencode(word).decode()
        except UnicodeError:
            raise ConfigError(f"the argument {printable(word)} is not UTF-8") from None


def has_surrogates(word: str) -> bool:
    """Whether it has bytes that Python could not read as text."""
    return any("\ud800" <= letter <= "\udfff" for letter in word)


def report(error: BaseException) -> int:
    """Print an error, or each of a group once, and return the exit code."""
    for text in dict.fromkeys(map(str, leaves(error))):
        print_error(text)
    return exit_code(error)
