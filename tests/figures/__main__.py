"""`python -m tests.figures [--beside REV]`: the figures of this checkout, beside those of another commit."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from tests.figures.house import house
from tests.figures.way import WAYS

ROOT: Final = Path(__file__).parents[2]
ROOMS: Final = {
    "the house: rooms, floors, arrows": ("rsmq", "28, 10, about 145"),
    "inside consumer": ("rsmq.consumer", "6, 6, 15"),
    "inside gateway": ("rsmq.gateway", "8, 5, 18"),
    "inside redis": ("rsmq.redis", ""),
}
"""Packages, and what they should come to."""
LINES: Final = {
    "publish": "at most 3 000", "read to settled": "at most 3 500", "park and back": "at most 4 000",
    "letter": "at most 3 000",
}  # fmt: skip
CALLS: Final = {"publish": "at most 80", "read to settled": "at most 90", "park and back": "at most 330", "letter": ""}


def follow(checkout: Path, way: str) -> dict[str, Any]:
    """Follow a way with the code of a checkout. Ends the command with a sentence where that code cannot be imported."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "figures" / "way.py"), way], cwd=checkout, check=False,
        env={**os.environ, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if missing := re.search(r"^ModuleNotFoundError: No module named '(\w+)", done.stderr, re.MULTILINE):
        package = missing[1].replace("_", "-")
        sys.exit(f"That commit imports {missing[1]}, which this environment does not have: run pip install {package}")
    if done.returncode:
        sys.exit(f"{way!r} could not be followed with the code of that commit:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def figures(checkout: Path) -> dict[str, str]:
    """All figures of a checkout, by name."""
    found = {title: str(house(checkout, package)) for title, (package, _) in ROOMS.items()}
    ways = {way: follow(checkout, way) for way in WAYS}
    found |= {f"lines of {way}": f"{each['lines']:,} in {len(each['files'])} files" for way, each in ways.items()}
    return found | {f"calls of {way}": str(each["calls"]) for way, each in ways.items()}


def beside(revision: str) -> dict[str, str]:
    """The figures of another commit, in a worktree of its own."""
    with tempfile.TemporaryDirectory(prefix="figures-") as directory:
        checkout = Path(directory) / "rsmq"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(checkout), revision], check=True)
        try:
            return figures(checkout)
        finally:
            subprocess.run([*git, "remove", "--force", str(checkout)], check=True)


def table(columns: dict[str, dict[str, str]]) -> str:
    """The figures as text: a line each, the goal last."""
    goals = {title: goal for title, (_, goal) in ROOMS.items()}
    goals |= {f"lines of {way}": goal for way, goal in LINES.items()}
    goals |= {f"calls of {way}": goal for way, goal in CALLS.items()}
    rows = [["", *columns, "goal"]]
    rows += [[name, *(each.get(name, "") for each in columns.values()), goal] for name, goal in goals.items()]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.figures", description=__doc__)
    parser.add_argument("--beside", metavar="REV", help="another commit, such as HEAD~10")
    options = parser.parse_args()
    if shutil.which("git") is None and options.beside:
        parser.error("--beside needs git")
    columns = {} if options.beside is None else {options.beside: beside(options.beside)}
    print(table({**columns, "now": figures(ROOT)}))


if __name__ == "__main__":
    main()
