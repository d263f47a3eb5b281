"""No page gets lost: those that users have known are there, on the site and in llms.txt."""

from __future__ import annotations

import re

import pytest

from tests.pages import DOCS, LLMS, RAW, counts, llms, navigation, now

MOVED = {
    "everyday": "benchmarks.md#one-message", "waiting": "benchmarks.md#how-long-a-message-waits",
    "limit-costs": "benchmarks.md#limits", "growth": "benchmarks.md#how-a-cost-grows", "scale": "benchmarks.md#scale",
    "pipeline-benchmarks": "benchmarks.md#pipeline", "chaos": "../tests/chaos/README.md",
    "simulation": "../tests/simulation/README.md",
}  # fmt: skip
"""Pages that were reports, and where they are now."""

PAGES = (
    "application batches benchmarks compatibility dashboard database deployment devices django glossary guarantees "
    "how-to index internals keys migrate-arq migrate-celery migrate-dramatiq migrate-faststream migrate-mqtt "
    "migrate-redis-streams migrate-rq migrate-taskiq mqtt mqtt-conformance notifications operations pipeline reference "
    "results robustness security settings stability telemetry testing tutorial wire-format"
)
"""What users read. A page goes only with a line in MOVED that says where its text is."""


@pytest.mark.parametrize("name", PAGES.split())
def test_a_page_of_the_users_is_there_and_can_be_found(name: str) -> None:
    """In the documents and in the navigation, from which the site and llms.txt are made."""
    assert (DOCS / f"{name}.md").exists()
    assert f"{name}.md" in {path for _, _, path in navigation()}


def test_each_page_of_the_navigation_is_on_the_list() -> None:
    """A new page is written down here, so that it cannot get lost either."""
    named = {path.removesuffix(".md") for _, _, path in navigation() if not path.startswith("decisions/")}
    assert named == set(PAGES.split())


@pytest.mark.parametrize("name", MOVED)
def test_a_report_that_moved_has_its_text_elsewhere(name: str) -> None:
    """Its heading is where the list says."""
    path, _, anchor = MOVED[name].partition("#")
    assert not (DOCS / f"{name}.md").exists()
    headings = re.findall(r"^##* (.+)$", (DOCS / path).read_text(), re.MULTILINE)
    assert not anchor or anchor in {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}


def test_llms_txt_has_each_page_once() -> None:
    """It is what the command writes, with a sentence for each page."""
    text = LLMS.read_text(encoding="utf-8")
    assert text == llms(), "run `python -m tests.pages`, and commit docs/llms.txt"
    named = re.findall(rf"^- \[[^]]+\]\({re.escape(RAW)}([^)]+)\): \S", text, re.MULTILINE)
    shown = [path for _, _, path in navigation() if path != "index.md" and not path.startswith("decisions/")]
    assert named == shown


def test_words_are_counted_by_kind() -> None:
    """The reference, which is written from the code, does not count as text of people."""
    found = counts({"a.md": "one two", "decisions/0001-x.md": "three", "reference.md": "four five six"})
    assert found == {"for users": (1, 2), "decisions": (1, 1), "written from the code": (1, 3)}
    assert sum(pages for pages, _ in counts(now()).values()) == len(list(DOCS.rglob("*.md")))
