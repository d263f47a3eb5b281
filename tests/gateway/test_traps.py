"""The table of traps names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROW = re.compile(r"^\| (\d+) \| .* \| (.*) \|$", re.MULTILINE)


def test_every_test_that_the_table_names_exists() -> None:
    """And every trap has one row."""
    there = {name for path in HERE.glob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))}
    rows = ROW.findall((HERE / "traps.md").read_text("utf-8"))
    numbers = [int(number) for number, _ in rows]
    assert numbers == sorted(set(numbers))
    assert max(numbers) <= 75
    named = {name.strip() for _, names in rows for name in names.split(",")}
    assert named - there == set()
