"""The page of measurements and the reports are what their results make of them, so that no figure is of another run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from benchmarks.page import SECTIONS
from benchmarks.pipeline import figure as pipeline
from benchmarks.section import PAGE, RESULTS, Section, rewrite, section


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_and_its_report_are_what_the_figures_say(name: str, tmp_path: Path) -> None:
    """`python -m benchmarks.page` writes both again; nothing else of the page changes."""
    each, page = SECTIONS[name], tmp_path / "benchmarks.md"
    shutil.copy(PAGE, page)
    shutil.copy(RESULTS / f"{name}.json", tmp_path)
    rewrite(page, name, "what is here is written again")
    each.write(tmp_path, page)
    assert page.read_text() == PAGE.read_text()
    if each.full is not None:
        assert (tmp_path / f"{name}.md").read_text() == (RESULTS / f"{name}.md").read_text()


def test_the_page_has_the_registered_sections_in_order() -> None:
    """A section without a benchmark would never be written again."""
    assert re.findall(r"<!-- measured: (.*) -->", PAGE.read_text()) == list(SECTIONS)


def test_figures_that_are_kept_reach_the_section(tmp_path: Path) -> None:
    """A run writes figures, report and section; the text around the section stays."""
    page = tmp_path / "page.md"
    page.write_text("above\n\n<!-- measured: x -->\n\nold\n\n<!-- end: x -->\n\nbelow\n")
    Section("x", lambda found: f"now {found}", lambda found: f"all of {found}\n").keep([1], tmp_path, page)
    assert page.read_text() == "above\n\n<!-- measured: x -->\n\nnow [1]\n\n<!-- end: x -->\n\nbelow\n"
    assert (tmp_path / "x.md").read_text() == "all of [1]\n"


@pytest.mark.parametrize("text", ["", "<!-- end: x --> <!-- measured: x -->", "<!-- measured: x --> " * 2])
def test_a_page_without_the_pair_of_marks_is_refused(text: str, tmp_path: Path) -> None:
    """Nothing is written into a page that was edited by mistake."""
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="no single section"):
        section(page, "x")


def test_a_goal_of_the_pipeline_is_compared_by_cpu() -> None:
    """Met or missed, beside the ratio to the base."""
    figures = [
        pipeline.Figure("read: plain", 200_000.4, 150_000, 0),
        pipeline.Figure("read: Arrow", 100_000, 75_000, 0.61, "read: plain", 100_000),
        pipeline.Figure("write: bare", 60_000, 50_000, 0),
        pipeline.Figure("write: marker", 100_000, 175_000, 0.4, "write: bare", 170_000),
    ]
    pytest.importorskip("pyspark", reason="the extra is not installed: pip install 'rsmq[spark]'")
    record = pipeline.told(figures, 500_000)
    assert "| read: Arrow | 100,000 | 75,000 | 61% | 0.50 | 100,000 MISSED |" in pipeline.full(record)
    assert "| write: marker | 175,000 | 3.50 | 170,000 met |" in pipeline.short(record)
