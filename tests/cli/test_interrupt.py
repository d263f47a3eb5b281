"""Ctrl-C while a command starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WAITS = "import signal\nprint('here', flush=True)\nsignal.pause()\n"


@pytest.mark.parametrize(
    ("module", "code", "exit_code"),
    [
        ("typer", WAITS, -signal.SIGINT),
        ("rsmq_waits", "import typer\ndef wait(*_):\n" + "".join(f"    {line}\n" for line in WAITS.splitlines())
         + "typer.main.get_group = wait\n", 128 + signal.SIGINT),
    ],
    ids=["imports", "parser"],
)  # fmt: skip
def test_interrupt_while_a_command_loads_prints_no_traceback(
    tmp_path: Path, module: str, code: str, exit_code: int
) -> None:
    """Ctrl-C ends the command while it imports its modules and while it builds its parser, without a traceback."""
    (tmp_path / f"{module}.py").write_text(code)
    start = f"import {module}; " if module == "rsmq_waits" else ""
    program = f"{start}import sys; sys.argv = ['rsmq', 'topic', 'list']; from rsmq.__main__ import main; main()"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        assert (process.wait(60), process.stderr and process.stderr.read()) == (exit_code, "")
