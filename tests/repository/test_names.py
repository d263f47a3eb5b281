"""Old private names stay gone, and the documents stay in plain English: decision 14 says which and why."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD_CLASSES = (
    "Carrier Line Doubt Convoy Courier Warden Intake Sharer Gate Turnstile Unparker Delayer Stretch StretchRunner "
    "Slot Lookout Vigil Ticker Every Signboard Grip Vitals Bell Beat Wire Guide Knowledge Flaw Complaints Post "
    "Parcel Van PostOffice Settlement Strand Desk Frame Reception Graveyard Register Carriage Choice Pulse Watch "
    "Figures Survey Given Standing Link Hand Fleet Writer"
)
"""The names before decision 14: no class may have one."""
OLD_WORDS = (
    "convoy courier warden intake sharer turnstile unparker delayer stretch lookout vigil timetable signboard grip "
    "novelty parcel graveyard carriage desk strand reception bell"
)
"""Those of them that are no ordinary words of these texts: they occur nowhere, also not inside another name."""
RIDDLES = re.compile(r"\b(nobody|somebody|everybody|whoever|whatever|is told|are told)\b", re.IGNORECASE)
"""Phrases without a subject: a component does something, it is not told of it."""
MOST_RIDDLES = {"pages": 15, "sources": 60}
RECORDS = {"0014-strict-layers.md", "CHANGELOG.md", "test_names.py"}  # they name the old names
SOURCES = [
    path
    for folder in ("rsmq", "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".lua") and path.name not in RECORDS
]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(path for folder in ("docs", "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.md"))),
]


def words(text: str) -> set[str]:
    """The words of a text in lower case; names are taken apart at capitals and underscores."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", text)}


@pytest.mark.parametrize("folder", ["rsmq", "tests", "benchmarks", "examples"])
def test_a_class_has_no_old_name(folder: str) -> None:
    """A class in a traceback has a name that a newcomer knows from the field."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.name.lstrip("_") for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        assert names & set(OLD_CLASSES.split()) == set(), path


@pytest.mark.parametrize("word", OLD_WORDS.split())
def test_an_old_word_occurs_nowhere(word: str) -> None:
    """Not as a variable, a parameter, a test, a comment or a page."""
    files = [*SOURCES, *(page for page in PAGES if page.name not in RECORDS)]
    found = [str(path.relative_to(ROOT)) for path in files if word in words(path.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize("kind", MOST_RIDDLES)
def test_a_sentence_has_a_component_as_its_subject(kind: str) -> None:
    """The few phrases that are left must not grow in number."""
    files = PAGES if kind == "pages" else SOURCES
    found = Counter({path.name: len(RIDDLES.findall(path.read_text(encoding="utf-8"))) for path in files})
    assert found.total() <= MOST_RIDDLES[kind], found.most_common(5)
