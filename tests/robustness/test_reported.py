"""The table of docs/robustness.md about situations reported by users of other systems: each row has its test."""

from __future__ import annotations

import re
from pathlib import Path

from tests.contract.test_guarantees import named_in

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
"""A test, or a file whose tests are all about the situation."""


def rows() -> list[list[str]]:
    """The cells of each row below the head."""
    text = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")
    section = text.partition("## Reported elsewhere\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert lines[0] == "| situation | reported by users of | with rsmq | test |"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_each_reported_situation_names_tests_that_exist() -> None:
    """A situation without a test could come back."""
    assert rows()
    for row in rows():
        assert len(row) == 4, row
        named = NAMED.findall(row[3])
        assert named, f"write `tests/folder/test_file.py::test_name` into the last cell: {row}"
        for path, name in named:
            assert (ROOT / path).exists(), path
            assert not name or name in named_in(path), f"{path}::{name}"
