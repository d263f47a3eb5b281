"""Commands as processes, killed in the middle and run again; one that a signal stops. Minutes long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from rsmq.model.settings import Settings
from tests.chaos.release import NEW, Release
from tests.pipeline.terminal import Terminal
from tests.pipeline.vault import Vault
from tests.servers import wait_until

COUNT = 12_000
SPARK = ("--engine", "spark")

pytestmark = [pytest.mark.long_chaos("minutes"), pytest.mark.timeout(900)]


class Command:
    """`rsmq pipeline ...` in a process group of its own, with a JVM and Python workers of its own."""

    def __init__(self, settings: Settings, *words: str, stderr: int | None = None, release: Release = NEW) -> None:
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RSMQ_", "SPARK_"))},
            "RSMQ_URL": settings.url or "", "RSMQ_PREFIX": settings.prefix, "TERM": "xterm",
            "PYTHONPATH": str(release.site), "PYTHONSAFEPATH": "1",
            "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rsmq", "pipeline", *words], env=variables, stdout=subprocess.PIPE, stderr=stderr,
            start_new_session=True, text=True,
        )  # fmt: skip

    def kill_when(self, condition: Callable[[], object], what: str, *, alone: bool = False) -> None:
        """SIGKILL at that moment to all that it has started, or to the command alone: its JVM then is an orphan."""
        wait_until(lambda: condition() or self.process.poll() is not None, what, 200)
        assert self.process.poll() is None, f"it had ended before: {what}"
        (os.kill if alone else os.killpg)(self.process.pid, signal.SIGKILL)
        assert self.wait()[0] == -signal.SIGKILL

    def wait(self) -> tuple[int, str]:
        """Exit code and what it has printed."""
        out, _ = self.process.communicate(timeout=300)
        return self.process.returncode, out

    def close(self) -> None:
        """Kill the processes that are left."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


@pytest.fixture
def run(vault: Vault, settings: Settings) -> Iterator[Callable[..., Command]]:
    """`run("archive", ...)`: a command that has started."""
    started: list[Command] = []

    def start(*words: str, stderr: int | None = None) -> Command:
        started.append(Command(settings, *words, stderr=stderr))
        return started[-1]

    yield start
    for each in started:
        each.close()


def records(vault: Vault) -> list[str]:
    """The batches that count."""
    return sorted(path.stem for path in vault.path.glob("_rsmq/batches/*.json"))


def test_archive_killed_and_run_again_has_each_message_once(vault: Vault, run: Callable[..., Command]) -> None:
    """While a batch is half written, when one has just been recorded, and with its JVM left over: each message once."""
    vault.add("orders", range(COUNT))
    words = ("archive", "orders", "--to", str(vault.path), "--batch", str(COUNT // 12), "--json", *SPARK)
    run(*words).kill_when(lambda: [*vault.path.glob(".spark-staging-*/**/*.parquet")], "a batch is half written")
    assert records(vault) == []
    run(*words).kill_when(lambda: records(vault), "a batch has been recorded")
    before = records(vault)
    run(*words).kill_when(lambda: records(vault) != before, "another one has been recorded", alone=True)
    before = records(vault)
    run(*words).kill_when(
        lambda: records(vault) != before and [*vault.path.glob(".spark-staging-*/**/*.parquet")], "one more is half way"
    )
    assert 0 < len(vault.archived("orders")) < COUNT
    code, out = run(*words).wait()
    assert (code, 0 < json.loads(out)["messages"] < COUNT) == (0, True)
    assert vault.archived("orders") == list(range(COUNT))
    assert [vault.position("orders", number) for number in (0, 1)] == [vault.last_id("orders", n) for n in (0, 1)]
    code, out = run(*words).wait()
    assert (code, json.loads(out)["messages"]) == (0, 0)


def test_replay_killed_and_run_again_publishes_each_message_once(vault: Vault, run: Callable[..., Command]) -> None:
    """Three times in the middle, once with its JVM left over, others publish meanwhile: each message once, in order."""
    vault.add("orders", range(COUNT))
    vault.archive("orders")
    vault.make("copy")
    words = ("replay", "orders", "--from", str(vault.path), "--to", "copy", "--json", *SPARK)

    def stored() -> int:
        return sum(vault.raw("XLEN", vault.keys.stream("copy", number)) for number in (0, 1))

    for part, alone in ((1, False), (2, True), (3, False)):
        started = run(*words, "--rate", str(COUNT / 10))
        started.kill_when(lambda part=part: stored() > part * COUNT // 5, f"{part} fifths are there", alone=alone)  # type: ignore[misc]
        vault.add("copy", [COUNT + part])
    assert stored() < COUNT
    code, out = run(*words).wait()
    plan = json.loads(out)
    assert (code, plan["messages"], plan["is_begun"], plan["is_finished"]) == (0, COUNT, True, False)
    found = [fields for part in vault.entries("copy") for fields in part]
    numbers = [int(fields[fields.index(b"data") + 1][5:-1]) for fields in found]
    assert sorted(numbers) == [*range(COUNT), *(COUNT + part for part in (1, 2, 3))]
    for key in range(4):
        of_key = [number for number in numbers if number < COUNT and number % 4 == key]
        assert of_key == list(range(key, COUNT, 4))
    code, out = run(*words).wait()
    assert (code, json.loads(out)["is_finished"], len(numbers)) == (0, True, stored())


def test_archive_stops_in_order_at_sigterm(vault: Vault, run: Callable[..., Command]) -> None:
    """SIGTERM: exit code 0, a bar until then on the terminal, retention knows how far it is, and no process is left."""
    vault.add("orders", range(100))
    with Terminal() as terminal:
        words = ("archive", "orders", "--to", str(vault.path), "--every", "PT1S", *SPARK)
        started = run(*words, stderr=terminal.file.fileno())
        wait_until(lambda: vault.position("orders", 1) == vault.last_id("orders", 1), "a batch is committed", 200)
        vault.add("orders", range(100, 200))
        wait_until(lambda: vault.position("orders", 1) == vault.last_id("orders", 1), "another one is", 200)
        os.kill(started.process.pid, signal.SIGTERM)
        code, out = started.wait()
        shown = terminal.shown()
    assert (code, out) == (0, f"archived 200 messages to file:{vault.path} ({out.rpartition('(')[2]}")
    assert "archiving orders" in shown
    assert "100 messages" in shown
    wait_until(lambda: not alive(started.process.pid), "its JVM and its workers have ended")
    assert vault.archived("orders") == list(range(200))
    assert [vault.position("orders", number) for number in (0, 1)] == [vault.last_id("orders", n) for n in (0, 1)]


def alive(group: int) -> bool:
    """Whether a process group has a member left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
