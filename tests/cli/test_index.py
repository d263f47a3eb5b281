"""The index of the command line: help and completion without importing a command, and what entry points add."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from rsmq.cli import index
from rsmq.cli.app import COMMANDS, added, app_for, make_app
from rsmq.cli.quick import completed_words
from rsmq.cli.write_index import made

ROOT = Path(__file__).parents[2]
WHOLE = [[], *([noun] for noun, entry in index.read().items() if "commands" in entry)]
HEAVY = {"redis", "pydantic", "pydantic_core", "rich", "anyio", "rsmq.broker", "rsmq.cli.topic", "rsmq.telemetry"}
"""What neither the version nor help nor the completion of names needs."""


def modules_of(words: list[str], **environment: str) -> tuple[str, set[str]]:
    """What a command prints, and the modules that it loads."""
    code = (
        "import sys, atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr));"
        "import rsmq.__main__ as m; m.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=200, cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", **environment},
    )  # fmt: skip
    return done.stdout, set(done.stderr.splitlines()[-1].split())


def test_the_index_is_what_the_commands_say() -> None:
    """`python -m rsmq.cli.write_index` writes it again."""
    assert index.FILE.read_text(encoding="utf-8") == made()


@pytest.mark.parametrize("words", WHOLE, ids=" ".join)
def test_help_from_the_index_is_the_help_of_the_commands(words: list[str]) -> None:
    """The light way and the one that imports everything print the same."""
    light = CliRunner().invoke(app_for([*words, "--help"]), [*words, "--help"], env={"COLUMNS": "200"})
    whole = CliRunner().invoke(make_app(), [*words, "--help"], env={"COLUMNS": "200"})
    assert light.exit_code == 0
    lines, expected = light.output.splitlines(), whole.output.splitlines()
    assert lines[0].replace("root", "rsmq") == expected[0].replace("root", "rsmq")
    assert sorted(lines[1:]) == sorted(expected[1:])


@pytest.mark.parametrize(
    ("words", "environment", "says"),
    [
        (["--version"], {}, "rsmq "),
        (["--help"], {}, "why-not-trimmed"),
        ([], {"_RSMQ_COMPLETE": "complete_bash", "COMP_WORDS": "rsmq to", "COMP_CWORD": "1"}, "topic"),
        ([], {"_RSMQ_COMPLETE": "complete_bash", "COMP_WORDS": "rsmq topic ", "COMP_CWORD": "2"}, "why-not-trimmed"),
        ([], {"_RSMQ_COMPLETE": "complete_bash", "COMP_WORDS": "rsmq topic set --", "COMP_CWORD": "3"}, "--on-full"),
        ([], {"_RSMQ_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "rsmq topic "}, '"why-not-trimmed"'),
        ([], {"_RSMQ_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "rsmq gateway --li"}, '"--listen"'),
    ],
)
def test_version_help_and_completion_import_no_command(
    words: list[str], environment: Mapping[str, str], says: str
) -> None:
    """They answer at once: a shell waits for them at each key."""
    said, loaded = modules_of(words, **environment)
    assert says in said
    assert loaded & HEAVY == set()


def test_values_are_completed_by_the_command() -> None:
    """Only the command knows the words that an option takes."""
    line = {"_RSMQ_COMPLETE": "complete_bash", "COMP_WORDS": "rsmq topic set --on-full ", "COMP_CWORD": "4"}
    said, loaded = modules_of([], **line)
    assert said.split() == ["reject", "trim"]
    assert "rsmq.cli.topic" in loaded


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, None),
        ({"_RSMQ_COMPLETE": "source_bash"}, None),
        ({"COMP_WORDS": "rsmq to", "COMP_CWORD": "1"}, ["to"]),
        ({"COMP_WORDS": "rsmq\ntopic\n", "COMP_CWORD": "2"}, ["topic", ""]),
        ({"COMP_WORDS": "rsmq to list", "COMP_CWORD": "1"}, ["to"]),
        ({"_TYPER_COMPLETE_ARGS": "rsmq topic "}, ["topic", ""]),
        ({"_TYPER_COMPLETE_ARGS": "rsmq "}, [""]),
        ({"_TYPER_COMPLETE_ARGS": "rsmq topic l"}, ["topic", "l"]),
    ],
)
def test_words_that_a_shell_completes(environment: dict[str, str], words: list[str] | None) -> None:
    """Bash gives them with the number of the current one, other shells as a line."""
    shell = {} if words is None else {"_RSMQ_COMPLETE": "complete_bash"}
    assert completed_words({**shell, **environment}) == words


@pytest.mark.parametrize("line", ["rsmq top", "rsmq topic why", "rsmq topic set --max"])
def test_a_real_bash_completes_commands_and_their_options(tmp_path: Path, line: str) -> None:
    """The script of `--show-completion`, in the shell that it is for."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    command = tmp_path / "rsmq"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m rsmq "$@"\n')
    command.chmod(0o755)
    place = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = subprocess.run(
        [sys.executable, "-m", "rsmq", "--show-completion", "bash"], capture_output=True, text=True, timeout=200,
        check=False, cwd=ROOT, env={**place, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    ).stdout  # fmt: skip
    assert "_RSMQ_COMPLETE" in script
    words = line.split()
    program = (
        f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; COMP_LINE={line!r}; COMP_POINT={len(line)}\n"
        "function=$(complete -p rsmq | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
        f'$function rsmq {words[-1]!r} {words[-2]!r}; printf "%s\\n" "${{COMPREPLY[@]}}"\n'
    )
    done = subprocess.run([bash, "-c", program], capture_output=True, text=True, timeout=200, check=True, env=place)
    expected = {"rsmq top": ["top", "topic"], "rsmq topic why": ["why-not-trimmed"]}
    assert done.stdout.split() == expected.get(line, ["--max-length"])


def test_the_core_names_no_command_of_an_extra() -> None:
    """They register themselves, as those of any other distribution."""
    assert set(added()) >= {"gateway", "dashboard", "pipeline", "sql", "outbox", "client", "retained"}
    assert not set(added()) & {*COMMANDS}
    assert {*index.read()} == {*COMMANDS, *(name for name, each in added().items() if each.is_own)}
    group = typer.main.get_command(make_app())
    assert set(index.read()) <= set(getattr(group, "commands", ()))
    assert json.loads(made()) == index.read()
