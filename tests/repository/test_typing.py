"""A user's code under pyright, strict: what is right passes, what is wrong is found. mypy does it in `make check`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.test_pages import BLOCK

ROOT = Path(__file__).parents[2]
SAMPLES = [ROOT / "tests" / "typing" / name for name in ("sample.py", "mistakes.py")]


def test_pyright_finds_the_mistakes_and_nothing_else(tmp_path: Path) -> None:
    """Strict, by basedpyright, which needs no download. An ignored mistake that is none is an error, too.

    The tests on the page about testing are clean as well.
    """
    page = tmp_path / "page"
    page.mkdir()
    for name, code in BLOCK.findall((ROOT / "docs" / "testing.md").read_text()):
        with (page / name).open("a") as file:
            file.write(code)
    files = [*SAMPLES, *page.glob("*.py")]
    assert {each.name for each in files} >= {"test_shop.py", "conftest.py"}
    pytest.importorskip("basedpyright")
    options = {
        "typeCheckingMode": "strict",
        "include": [str(path) for path in files],
        "extraPaths": [str(ROOT), str(page)],
        "pythonVersion": "3.11",
        "enableTypeIgnoreComments": True,
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    config = tmp_path / "pyrightconfig.json"
    config.write_text(json.dumps(options))
    command = [sys.executable, "-m", "basedpyright", "--project", str(config), "--outputjson", "--pythonpath"]
    done = subprocess.run(
        [*command, sys.executable], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert answer["summary"]["filesAnalyzed"] == len(files)
    errors = [each for each in answer["generalDiagnostics"] if each["severity"] == "error"]
    assert [(Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"]) for each in errors] == []
