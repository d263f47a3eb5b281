"""Commands and doctor's rules of another distribution, as after `pip install`: a module, its metadata on the path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import Server

ROOT = Path(__file__).parents[2]
MODULE = """
import typer

def hello(name: str = "you") -> None:
    \"\"\"Say hello.\"\"\"
    typer.echo(f"hello, {name}")

async def slow(client, keys, facts):
    length = await client.execute_command("STRLEN", f"{keys.prefix}:hello")
    return [f"hello has {length} letters in {len(facts.board.groups)} groups: say less"] if length else []

async def wrong(client, keys, facts):
    raise ValueError("no greeting")
"""
ENTRIES = """
[rsmq.commands]
hello = rsmq_hello:hello
far = rsmq_hello_far:app [far]
broken = rsmq_hello:nothing
worker = rsmq_hello:hello
gateway = rsmq_hello:hello

[rsmq.doctor_rules]
long-greeting = rsmq_hello:slow
wrong-greeting = rsmq_hello:wrong
far-greeting = rsmq_hello_far:rule [far]
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a command beside which `rsmq-hello` is installed."""
    (tmp_path / "rsmq_hello.py").write_text(MODULE)
    (tmp_path / "rsmq_hello_far.py").write_text("import package_that_nobody_has\napp = None\n")
    metadata = tmp_path / "rsmq_hello-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rsmq-hello\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRIES)
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "COLUMNS": "200"}


def rsmq(environment: dict[str, str], *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    return subprocess.run(
        [sys.executable, "-m", "rsmq", *words], capture_output=True, text=True, timeout=200, check=False,
        env={**environment, **more},
    )  # fmt: skip


def test_command_of_another_distribution_runs(installed: dict[str, str]) -> None:
    """It has its own help, and stands in the list and in the completion without being imported."""
    assert rsmq(installed, "hello", "--name", "Ada").stdout == "hello, Ada\n"
    assert "Say hello." in rsmq(installed, "hello", "--help").stdout
    assert "From rsmq-hello." in rsmq(installed, "--help").stdout
    line = {"_RSMQ_COMPLETE": "complete_bash", "COMP_WORDS": "rsmq he", "COMP_CWORD": "1"}
    assert rsmq(installed, **line).stdout == "hello\n"


def test_command_whose_package_is_missing_says_what_to_install(installed: dict[str, str]) -> None:
    """From the extras of its entry point."""
    done = rsmq(installed, "far")
    assert (done.returncode, done.stderr) == (
        2, "rsmq: far needs package_that_nobody_has, which is not installed: pip install 'rsmq-hello[far]'\n",
    )  # fmt: skip


def test_command_that_cannot_be_loaded_names_its_distribution(installed: dict[str, str]) -> None:
    """And the others work."""
    done = rsmq(installed, "broken")
    assert done.returncode == 2
    assert "broken cannot be loaded (AttributeError" in done.stderr
    assert done.stderr.endswith("update or uninstall rsmq-hello\n")


@pytest.mark.parametrize("word", ["worker", "gateway"])
def test_no_distribution_takes_a_command_of_rsmq(installed: dict[str, str], word: str) -> None:
    """The core has its own names, and of two entry points that of rsmq is taken."""
    said = rsmq(installed, word, "--help").stdout
    assert f"Example: rsmq {word} app:broker" in said
    assert "Say hello." not in said


def test_rules_of_another_distribution_are_findings_of_the_doctor(
    installed: dict[str, str], server: Server, prefix: str
) -> None:
    """What they find, what has failed in one, and what another one needs; all others go on."""
    with server.client() as client:
        client.set(f"{prefix}:hello", "hi", ex=600)
    done = rsmq(installed, "doctor", "--over", "PT0S", "--json", RSMQ_URL=server.url, RSMQ_PREFIX=prefix)
    assert done.returncode == 0, done.stderr
    found = {each["topic"]: (each["level"], each["text"]) for each in json.loads(done.stdout)["findings"]}
    assert found["long-greeting"] == ("warn", "hello has 2 letters in 0 groups: say less")
    said = "its rule failed (ValueError: no greeting): update or uninstall rsmq-hello"
    assert found["wrong-greeting"] == ("warn", said)
    assert found["far-greeting"][1].endswith("pip install 'rsmq-hello[far]'")
    assert found["queues"][0] == "ok"
