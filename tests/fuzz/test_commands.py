"""A fuzzer over the command line: any words end with a documented exit code and a sentence, on a real server.

Short in every run; `CHAOS=long` tries a hundred times as many.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import click
import pytest
import typer.main
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rsmq import Broker, Settings
from rsmq.cli import main, make_app

IS_LONG = os.environ.get("CHAOS") == "long"
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)] if IS_LONG else []

ENDLESS = {
    "worker", "server", "top", "dashboard", "exporter", "bench", "demo", "pipeline", "device tail", "client trace",
}  # fmt: skip
"""They run until a signal, or start Spark: only their wrong use ends by itself."""


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that ends by itself, with its words."""

    def walk(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], click.Command]]:
        if " ".join(words) in ENDLESS:
            return
        inner = getattr(command, "commands", None)
        if inner is None:
            yield words, command
        for name, each in (inner or {}).items():
            yield from walk((*words, name), each)

    return walk((), typer.main.get_command(make_app()))


COMMANDS = list(commands())


# a shell can pass neither NUL nor a lone surrogate, but bytes that are not UTF-8 arrive as U+DC80 to U+DCFF
CHARACTERS = st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.sampled_from("\udc80\udcff")
TEXTS = st.text(CHARACTERS, max_size=12)
VALUES = TEXTS | st.sampled_from([
    "orders", "billing", "phone-1", "0/1-1", "1/0-0", "99/1-1", "18446744073709551616/1", "0/99999999999999999999-1",
    "-", "--", "-1", "0", "1", "99999999999999999999", "1e999", "nan", "PT1S", "P1D", "PT0S", "P999999999D", "P1Y",
    "-PT1S",
    "2026-01-01T00:00:00Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59-23:59", "earliest", "latest", "1-1", "a=b",
    "a.b!=c", "=",
    '{"n": 1}', '{"n":', "[1]", "null", '"\\ud800"', "10/s", "0.000001/h", "{x}", "\x1b[31m", "redis://", "a" * 300,
])  # fmt: skip


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """The words of a command, its own options and arguments or others, in any order."""
    words, command = draw(st.sampled_from(COMMANDS))
    options = [name for each in command.params for name in each.opts if name.startswith("-")]
    options = [name for name in options if name not in ("--url", "--follow", "-f")]
    arguments = [each for each in command.params if isinstance(each, click.Argument)]
    parts: list[list[str]] = [[draw(VALUES)] for _ in range(draw(st.integers(0, len(arguments) + 1)))]
    for _ in range(draw(st.integers(0, 3))):
        parts.append([draw(st.sampled_from(options) | TEXTS), *([draw(VALUES)] if draw(st.booleans()) else [])])
    if draw(st.booleans()) and "--yes" in options:
        parts.append(["--yes"])
    return [*words, *(word for part in draw(st.permutations(parts)) for word in part)]


@pytest.fixture(scope="module")
def server_settings(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """The environment of the commands, with a topic, in a directory of their own: `rsmq new` writes into it."""
    found = Settings(url=server_url, prefix="fuzz", preflight="warn", unavailable_timeout="PT3S")  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("commands"))
        patch.setenv("RSMQ_URL", server_url)
        patch.setenv("RSMQ_PREFIX", "fuzz")
        patch.setenv("COLUMNS", "80")
        broker = Broker(found)
        broker.publish_sync("orders", {"n": 1})
        level = logging.getLogger("rsmq").level
        yield found
        logging.getLogger("rsmq").setLevel(level)
        broker._portal.close()


def run(words: list[str], stdin: bytes) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process, which takes a hundredth of the time."""
    out, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict") for _ in range(2))
    with tempfile.TemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        file.write(stdin)
        file.seek(0)
        patch.setattr(sys.modules["rsmq.cli.publish"], "STDIN", file.fileno())
        patch.setattr(sys, "argv", ["rsmq", *words])
        patch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
        code: Any = 0
        with redirect_stdout(out), redirect_stderr(errors):
            try:
                main()
            except SystemExit as end:
                code = end.code
        sys.stdin.close()
    texts = []
    for stream in (out, errors):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return int(code or 0), texts[0], texts[1]


@settings(
    max_examples=4_000 if IS_LONG else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(words=lines(), stdin=st.binary(max_size=60) | st.just(b'{"n": 1}\n\n"a"\r\n{"n":\n'))
@example(words=["publish", "orders", "\udcff"], stdin=b"")
@example(words=["publish", "orders", "1", "--key", "\udcff"], stdin=b"")
@example(words=["dlq", "show", "orders", "billing", "0/99999999999999999999-1"], stdin=b"")
@example(words=["device", "show", "\udcff"], stdin=b"")
@example(words=["new", "orders"], stdin=b"")
def test_any_command_line_ends_with_a_documented_code(
    server_settings: Settings, words: list[str], stdin: bytes
) -> None:
    """0 done, 1 failed or a negative answer, 2 wrong use or configuration; a failure says why, without a traceback."""
    code, out, errors = run(words, stdin)
    assert code in (0, 1, 2), (words, code, errors)
    assert "Traceback" not in errors, (words, errors)
    assert code == 0 or out.strip() or errors.strip(), (words, code)
