"""The Python reference is what the code says, and complete."""

from __future__ import annotations

import re
from functools import cache

import pytest

import rsmq

griffe = pytest.importorskip("griffe", reason="the extra `docs` is not installed")

from rsmq.model.publish_options import PublishOptions  # noqa: E402
from tests import reference  # noqa: E402

PAGE = reference.PAGE.read_text(encoding="utf-8")
HEADINGS = re.findall(r"^####? (.+)$", PAGE, re.MULTILINE)


@cache
def written() -> str:
    """What the command would write now."""
    return reference.page()


def test_the_reference_is_what_the_code_says() -> None:
    """A signature or a docstring that changes is written into the page by the command."""
    assert written() == PAGE, "run `python -m tests.reference`, and commit docs/reference.md"


def test_each_public_name_has_an_entry() -> None:
    """Whatever is imported from `rsmq`, with its signature."""
    named = set(HEADINGS) | set(re.findall(r"^class (\w+)", PAGE, re.MULTILINE))
    assert set(rsmq.__all__) - named == set(), "write it into SECTIONS of tests/reference.py"


def test_what_is_left_out_exists() -> None:
    """Members that only rsmq calls, and classes that only rsmq makes: a name that is gone is not kept in the lists."""
    paths = [path for _, _, group in reference.SECTIONS for path in group]
    package = reference.load()
    found = [package[path.removeprefix("rsmq.")] for path in paths]
    classes = {
        each.name: reference.target(each)
        for one in found
        for each in (reference.public(one) if one.is_module else [one])
    }
    assert set(classes) >= reference.GIVEN
    for name in reference.INTERNAL:
        owner, _, member = name.partition(".")
        assert member in classes[owner].all_members, name


def test_members_are_shown_with_their_signature() -> None:
    """Those of a class and those of its bases; options that are spelled once are expanded."""
    assert {"Broker.handler", "Broker.publish", "Router.every", "Topics.change", "Harness.advance"} <= set(HEADINGS)
    publish = PAGE.partition("#### Broker.publish\n")[2].partition("####")[0]
    assert "def publish(\n    topic: str,\n    payload: Any,\n    *,\n" in publish
    assert all(f"\n    {name}: " in publish for name in PublishOptions.__annotations__)
    assert "    expires: " in publish
    assert "MessageRef" in publish
