"""Suites that are played again and again: what failed is kept by test and seed. And the shares of a run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import repeat, shares

SOMETIMES = """
import sys

def test_fails_in_one_round():
    seed = next(each for each in sys.argv if each.startswith("--hypothesis-seed="))
    assert not seed.endswith("=2"), "the second round"

def test_passes():
    pass
"""


def test_failures_are_kept_by_test_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that passes leaves an empty file, one that fails its seed; its command fails again."""
    file, kept = tmp_path / "test_sometimes.py", tmp_path / "failures.json"
    file.write_text(SOMETIMES)
    monkeypatch.setattr(repeat, "pytest_command", one_process(repeat.pytest_command))
    assert repeat.main([str(file), "--times", "1", "--output", str(kept)]) == 0
    assert json.loads(kept.read_text()) == {}
    assert repeat.main([str(file), "--times", "1", "--first", "2", "--output", str(kept)]) == 1
    found = json.loads(kept.read_text())
    (test,) = found
    assert test.endswith("test_sometimes::test_fails_in_one_round")
    (failure,) = found[test]
    assert failure["seed"] == 2
    assert "the second round" in failure["said"]
    again = subprocess.run([sys.executable, *shlex.split(failure["command"])[1:]], capture_output=True, check=False)
    assert again.returncode == 1


def one_process(command: object) -> object:
    """Without `-n 2`, which starts two more interpreters a round."""

    def plain(paths: list[str], seed: int) -> list[str]:
        return [each for each in command(paths, seed) if each not in ("-n", "2")]  # type: ignore[operator]

    return plain


def test_a_run_that_cannot_start_counts_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite that was renamed must not look clean."""
    monkeypatch.setattr(repeat, "pytest_command", one_process(repeat.pytest_command))
    assert [test for test, _ in repeat.play([str(tmp_path / "nothing.py")], 1)] == ["pytest"]


@pytest.mark.parametrize("path", [path for paths in repeat.SUITES.values() for path in paths])
def test_a_suite_that_is_repeated_exists(path: str) -> None:
    """Its folder or file."""
    assert Path(path).exists() or (Path(__file__).parents[2] / path).exists()


def test_shares_are_those_of_the_report(tmp_path: Path) -> None:
    """By folder, the most CPU first, with the time of the whole run, and what each process did before its tests."""
    report = tmp_path / "report.xml"
    cpu = '<properties><property name="cpu_s" value="7.5"/></properties>'
    report.write_text(
        f'<testsuites><testsuite><testcase classname="tests.dlq.test_a" name="x" time="30">{cpu}</testcase>'
        f'<testcase classname="tests.dlq.test_b" name="y" time="30">{cpu}</testcase>'
        '<testcase classname="tests.test_asgi" time="20"><properties><property name="start_cpu_s" value="15"/>'
        "</properties></testcase></testsuite></testsuites>"
    )
    found = shares.shares(report)
    assert found == {"dlq": shares.Share(2, 15.0, 60.0), "(files)": shares.Share(1, 0.0, 20.0)} | {
        "(start, collect)": shares.Share(0, 15.0, 0.0)
    }
    said = shares.text(found, wall_s=90, day="2026-01-31")
    assert "took 1.5 minutes and 30 s of CPU" in said
    assert said.index("| dlq | 2 | 15 | 50 % | 60 |") < said.index("| (files) | 1 | 0 | 0 % | 20 |")
    assert "| (start, collect) | 0 | 15 | 50 % | 0 |" in said


BUSY = """
import subprocess, sys, time

SPIN = "import sys, time\\nwhile time.process_time() < 0.2: pass\\nprint(flush=True)\\nsys.stdin.read()"

def process():
    command = [sys.executable, "-S", "-c", SPIN]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

def test_waits():
    time.sleep(0.01)

def test_starts_a_busy_process():
    process().communicate()

def test_leaves_a_busy_process():
    process().stdout.readline()
"""

RECORDED = """
from tests.cpu import CpuRecorder

def pytest_configure(config):
    config.pluginmanager.register(CpuRecorder())
"""


def test_the_cpu_of_a_test_is_also_that_of_its_processes(tmp_path: Path) -> None:
    """Of those that have ended, and of those that still run. Waiting is none."""
    (tmp_path / "test_busy.py").write_text(BUSY)
    (tmp_path / "conftest.py").write_text(RECORDED)
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--junit-xml=report.xml", "--rootdir=."], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(shares.README.parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    waits, starts, leaves = map(shares.cpu_s_of, ElementTree.parse(tmp_path / "report.xml").iter("testcase"))
    assert min(starts, leaves) >= 0.15  # /proc rounds down
    assert waits < 0.15


def test_the_page_names_each_folder_of_the_tests() -> None:
    """A suite without a line there stands for nothing that a reader could know."""
    text = shares.README.read_text(encoding="utf-8").partition("## Which suite")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z]+)`", text))
    folders = {path.parent.name for path in shares.README.parent.glob("*/__init__.py")}
    assert folders - named == set()
    assert named - folders == set()
