"""A user's code under strict type checkers: what is right passes, what is wrong is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAMPLE, MISTAKES = (ROOT / "tests" / "typing" / name for name in ("sample.py", "mistakes.py"))


def wrong_lines() -> list[int]:
    """The lines that are marked as mistakes."""
    return [number for number, line in enumerate(MISTAKES.read_text().splitlines(), 1) if "# mistake:" in line]


def test_mypy(tmp_path: Path) -> None:
    """`mypy --strict`: nothing to say about the sample, and exactly the mistakes in the other file."""
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nstrict = True\nplugins = pydantic.mypy\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, "--follow-imports=silent", "--no-error-summary", str(SAMPLE), str(MISTAKES)],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    found = [line.split(":")[:2] for line in done.stdout.splitlines() if ": error:" in line]
    assert {Path(name).name for name, _ in found} == {MISTAKES.name}, done.stdout + done.stderr
    assert sorted({int(line) for _, line in found}) == wrong_lines()


def test_pyright(tmp_path: Path) -> None:
    """pyright in its strict mode (basedpyright's, which needs no download): the same."""
    pytest.importorskip("basedpyright")
    config = tmp_path / "pyrightconfig.json"
    config.write_text(
        json.dumps(
            {
                "typeCheckingMode": "strict",
                "include": [str(SAMPLE), str(MISTAKES)],
                "extraPaths": [str(ROOT)],
                "pythonVersion": "3.11",
                "reportUnusedFunction": "none",  # handlers are called by rsmq
            }
        )
    )
    command = [sys.executable, "-m", "basedpyright", "--project", str(config), "--outputjson", "--pythonpath"]
    done = subprocess.run(
        [*command, sys.executable], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )  # fmt: skip
    found = [
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"])
        for each in json.loads(done.stdout)["generalDiagnostics"]
        if each["severity"] == "error"
    ]
    assert [each for each in found if each[0] != MISTAKES.name] == []
    assert sorted({line for _, line, _ in found}) == wrong_lines()
