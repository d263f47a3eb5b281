"""The pages of measurements are what their results make of them, so that no figure is of another run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.curve import write_page
from benchmarks.peers import report, results
from benchmarks.pipeline import figure as pipeline
from benchmarks.telemetry import write

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_the_peers(tmp_path: Path) -> None:
    """docs/benchmarks.md comes from docs/benchmarks.json: `python -m benchmarks.peers --page` writes it again."""
    shutil.copy(DOCS / "benchmarks.json", tmp_path)
    report.write(tmp_path / "benchmarks.md")
    assert (tmp_path / "benchmarks.md").read_text() == (DOCS / "benchmarks.md").read_text()


def test_a_new_run_of_the_peers_keeps_remarks(tmp_path: Path) -> None:
    """They are written into the results by hand."""
    path = tmp_path / "benchmarks.json"
    path.write_text('{"remarks": ["by hand"], "minutes": 1}')
    results.save(tmp_path / "benchmarks.md", {}, {}, "Valkey", 120)
    told = json.loads(path.read_text())
    assert (told["remarks"], told["minutes"]) == (["by hand"], 2)


def test_the_page_of_growth(tmp_path: Path) -> None:
    """docs/growth.md comes from docs/growth.json: `python -m benchmarks.growth --page` writes it again."""
    told = json.loads((DOCS / "growth.json").read_text())
    write_page(told["curves"], told["facts"], tmp_path / "growth.md")
    assert (tmp_path / "growth.md").read_text() == (DOCS / "growth.md").read_text()


def test_the_page_of_telemetry(tmp_path: Path) -> None:
    """Its table comes from docs/telemetry.json: `python -m benchmarks.telemetry --write` writes both."""
    shutil.copy(DOCS / "telemetry.md", tmp_path)
    write(json.loads((DOCS / "telemetry.json").read_text()), tmp_path)
    for name in ("telemetry.md", "telemetry.json"):
        assert (tmp_path / name).read_text() == (DOCS / name).read_text()


def test_the_page_of_the_pipeline(tmp_path: Path) -> None:
    """docs/pipeline-benchmarks.md comes from its JSON: `python -m benchmarks.pipeline --page` writes it again."""
    figures = [
        pipeline.Figure("read: plain", 200_000.4, 150_000, 0),
        pipeline.Figure("read: Arrow", 100_000, 75_000, 0.61, "read: plain", 100_000),
        pipeline.Figure("write: bare", 60_000, 50_000, 0),
        pipeline.Figure("write: marker", 100_000, 175_000, 0.4, "write: bare", 170_000),
    ]
    pytest.importorskip("pyspark", reason="the extra is not installed: pip install 'rsmq[spark]'")
    pipeline.keep(figures, 500_000, tmp_path)
    page = (tmp_path / "pipeline-benchmarks.md").read_text()
    assert "| read: Arrow | 100,000 | 75,000 | 61% | 0.50 | 100,000 MISSED |" in page
    assert "| write: marker | 100,000 | 175,000 | 40% | 3.50 | 170,000 met |" in page
    if (DOCS / "pipeline-benchmarks.json").exists():
        shutil.copy(DOCS / "pipeline-benchmarks.json", tmp_path)
        pipeline.write_page(tmp_path)
        assert (tmp_path / "pipeline-benchmarks.md").read_text() == (DOCS / "pipeline-benchmarks.md").read_text()
