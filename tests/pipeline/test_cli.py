"""`rsmq pipeline` as a person or a scheduler runs it. Other commands do not load Spark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rsmq.cli import make_app
from rsmq.cli.pipeline import absolute, connection_options, parse_size, topic_option
from rsmq.errors import ConfigError
from rsmq.model.settings import Settings
from tests.pipeline.terminal import Terminal
from tests.pipeline.vault import Vault
from tests.servers import wait_until

ROOT = Path(__file__).parents[2]
Run = Callable[..., str]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Where commands show their bars."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with Terminal() as running:
        yield running


@pytest.fixture
def run(
    vault: Vault,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: Terminal,
) -> Run:
    """`rsmq pipeline ...` within the session of the tests: what it prints; it must succeed."""
    monkeypatch.setenv("RSMQ_URL", settings.url or "")
    monkeypatch.setenv("RSMQ_PREFIX", settings.prefix)

    def invoke(*words: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal.file)
            make_app()(["pipeline", *words], standalone_mode=False)
        return capsys.readouterr().out

    return invoke


def test_commands_report_in_a_line_or_in_json(vault: Vault, run: Run, terminal: Terminal, tmp_path: Path) -> None:
    """Archive, compact, count, replay, replay again, report: each says in a line what it did, or in JSON.

    Each shows a bar on a terminal, and none with --json.
    """
    path = str(vault.path)
    vault.add("orders", range(30))
    assert run("archive", "orders", "--to", path) == f"archived 30 messages to file:{path} (1 batch)\n"
    shown = terminal.shown()
    assert "archiving orders" in shown
    assert "30 messages" in shown
    vault.add("orders", range(30, 40))
    arrow = ("--engine", "arrow")
    done = json.loads(run("archive", "ord.*", "--to", path, "--json", *arrow))
    assert (done["messages"], done["batches"]) == (10, 1)
    assert terminal.shown() == ""
    assert "nothing to do up to" in run("compact", path, *arrow)
    assert "compacting" in terminal.shown()
    today = datetime.now(UTC).date().isoformat()
    (day,) = json.loads(run("compact", path, "--until", today, "--json"))["days"]
    assert (day["topic"], day["messages"], day["files_after"]) == ("orders", 40, 1)
    replay = ("replay", "orders", "--from", path, "--to", "copy", "--key", "k1")
    assert run(*replay, "--dry-run", *arrow).splitlines()[-1] == "nothing was published (--dry-run)"
    assert "counting" in terminal.shown()
    assert not vault.server.exists(vault.keys.topic("copy"))
    plan = json.loads(run(*replay, "--json"))
    assert terminal.shown() == ""
    assert (plan["messages"], plan["is_dry_run"], plan["is_finished"]) == (10, False, False)
    assert run(*replay, *arrow).splitlines()[-1].startswith(f"job {plan['job']} has finished before")
    out = tmp_path / "page.html"
    assert run("report", "--from", path, "--out", str(out), *arrow) == f"40 messages, 0 groups, 0 dead letters: {out}\n"
    assert "counting" in terminal.shown()
    facts = json.loads(run("report", "orders", "--out", str(out), "--json"))
    assert sum(volume["messages"] for volume in facts["history"]["volumes"]) == 40


def test_archive_every_runs_until_sigterm(vault: Vault, run: Run) -> None:
    """With --every it archives new messages; at SIGTERM it ends in order, and retention knows how far it is."""
    vault.add("orders", range(5))

    def is_archived() -> bool:
        return all(vault.position("orders", number) == vault.last_id("orders", number) for number in (0, 1))

    def publish_and_stop() -> None:
        try:
            wait_until(is_archived, "the first batch is there", 60)
            vault.add("orders", range(5, 8))
            wait_until(is_archived, "the second one, too", 60)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: None)  # should the command have ended too early
    try:
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(publish_and_stop)
            line = run("archive", "ord.*", "--to", str(vault.path), "--every", "PT0.1S")
            publishing.result()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert line.startswith("archived 8 messages")
    assert vault.archived("orders") == list(range(8))


def test_send_shows_examples_and_sends_each_row_once(
    vault: Vault, run: Run, terminal: Terminal, tmp_path: Path
) -> None:
    """A dry run shows some of what would be sent; control characters of a file do not reach the terminal."""
    path = tmp_path / "audience.jsonl"
    path.write_text('{"id": "a", "text": "\\u001b[31m"}\n{"id": "b", "text": "x"}\n')
    words = ("send", str(path), "--to", "greetings", "--key", "id")
    shown = run(*words, "--value", "text", "--dry-run")
    assert "would send 2 messages to greetings" in shown
    assert "\x1b" not in shown
    assert "sent 2 messages to greetings" in run(*words)
    assert "sending 2 rows" in terminal.shown()
    again = run(*words)
    assert "sent nothing: 2 messages had been sent to greetings before" in again
    assert "use another --job" in again
    found = json.loads(run(*words, "--json"))
    assert (found["rows"], found["stored"], found["skipped"]) == (2, 0, 2)
    assert sum(len(part) for part in vault.entries("greetings", 8)) == 2
    assert CliRunner().invoke(make_app(), ["pipeline", *words, "--expires", "PT1H"]).exit_code == 2


def test_connection_options_never_contain_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """A password never travels in an option: it stays in the environment of this machine, or is refused."""
    monkeypatch.setenv("RSMQ_URL", "redis://h:1/0")
    with connection_options(None, None, None, None) as options:
        assert options == {"prefix": "rsmq", "url": "redis://h:1/0"}
    with connection_options("redis://u:secret@h:1/0", None, None, "local[4]") as options:
        assert options == {"prefix": "rsmq"}
        assert os.environ["RSMQ_URL"] == "redis://u:secret@h:1/0"
    with (
        pytest.raises(ConfigError, match=r"redis://u:\*\*\*@h:1/0 contains a password"),
        connection_options("redis://u:secret@h:1/0", None, None, "spark://m:7077"),
    ):
        pass
    with connection_options("redis://u@h:1/0", "QUEUE_PASSWORD", None, "spark://m:7077") as options:
        assert options == {"prefix": "rsmq", "url": "redis://u@h:1/0", "passwordEnv": "QUEUE_PASSWORD"}


def test_arguments_become_options_paths_and_sizes() -> None:
    """Names are subscribed to, anything else is a pattern; paths are whole; sizes have units."""
    assert topic_option("orders, bills.eu") == {"subscribe": "orders,bills.eu"}
    assert topic_option("or.*|bills") == {"subscribePattern": "or.*|bills"}
    assert absolute("x/y") == f"file://{Path.cwd()}/x/y"
    assert absolute("s3a://bucket/x") == "s3a://bucket/x"
    assert parse_size("2MiB") == 2 << 20
    with pytest.raises(typer.BadParameter, match="is not a valid size"):
        parse_size("many")


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run a line of Python by itself."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_other_commands_do_not_load_spark() -> None:
    """The command line starts without Spark, Arrow and the pictures."""
    code = (
        "import sys, rsmq.cli; rsmq.cli.make_app(); "
        "print(sorted({'pyspark', 'py4j', 'pyarrow', 'matplotlib', 'pandas'} & {*sys.modules}))"
    )
    assert python(code).stdout == "[]\n"


def test_commands_without_the_extra_name_what_to_install() -> None:
    """One line that says what to install, and exit code 2, of each command."""
    commands = (["archive", "o", "--to", "x"], ["report"], ["replay", "o", "--from", "x", "--to", "y"])
    code = (
        "import sys; sys.modules['pyspark'] = None; from rsmq.cli import main\n"
        f"for words in {commands!r}:\n"
        "    sys.argv = ['rsmq', 'pipeline', *words, '--url', 'redis://127.0.0.1:1']\n"
        "    try: main()\n"
        "    except SystemExit as end: print(end.code)\n"
    )
    done = python(code)
    assert done.stdout.split() == ["2", "2", "2"]
    line = "rsmq: this needs Spark, and pyspark is not installed: pip install 'rsmq[spark]'\n"
    assert done.stderr == line * 3


def test_help_works_without_spark() -> None:
    """The help of a command is there without the extra."""
    code = (
        "import sys; sys.modules['pyspark'] = None; from rsmq.cli import main; "
        "sys.argv = ['rsmq', 'pipeline', 'replay', '--help']; main()"
    )
    assert "--dry-run" in python(code).stdout
