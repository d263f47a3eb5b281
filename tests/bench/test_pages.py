"""The pages of measurements are what their results make of them, so that no figure is of another run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from bench.curve import write_page
from bench.peers import report
from bench.telemetry import write

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_the_peers(tmp_path: Path) -> None:
    """docs/benchmarks.md comes from docs/benchmarks.json: `python -m bench.peers --page` writes it again."""
    shutil.copy(DOCS / "benchmarks.json", tmp_path)
    report.write(tmp_path / "benchmarks.md")
    assert (tmp_path / "benchmarks.md").read_text() == (DOCS / "benchmarks.md").read_text()


def test_the_page_of_growth(tmp_path: Path) -> None:
    """docs/growth.md comes from docs/growth.json: `python -m bench.growth --page` writes it again."""
    told = json.loads((DOCS / "growth.json").read_text())
    write_page(told["curves"], told["facts"], tmp_path / "growth.md")
    assert (tmp_path / "growth.md").read_text() == (DOCS / "growth.md").read_text()


def test_the_page_of_telemetry(tmp_path: Path) -> None:
    """Its table comes from docs/telemetry.json: `python -m bench.telemetry --write` writes both."""
    shutil.copy(DOCS / "telemetry.md", tmp_path)
    write(json.loads((DOCS / "telemetry.json").read_text()), tmp_path)
    for name in ("telemetry.md", "telemetry.json"):
        assert (tmp_path / name).read_text() == (DOCS / name).read_text()
