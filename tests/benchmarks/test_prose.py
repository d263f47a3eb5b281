"""Filling the paragraphs of generated pages."""

from __future__ import annotations

from pathlib import Path

from benchmarks.prose import wrapped

DOCS = Path(__file__).parents[2] / "docs"
PAGE = """# A title

Lines of a paragraph
that are short.
- an item
  goes on
1. another {long}

| a | b |
```
code   stays
as it is
```
"""


def test_paragraphs_are_filled_and_everything_else_stays() -> None:
    """Short lines are joined and long ones divided, within a paragraph or a list item."""
    page = wrapped(PAGE.format(long="word " * 30).replace(" \n", "\n"))
    assert (
        page
        == """# A title

Lines of a paragraph that are short.
- an item goes on
1. another word word word word word word word word word word word word word word word word word word word word word word
   word word word word word word word word

| a | b |
```
code   stays
as it is
```
"""
    )
    assert wrapped(page) == page


def test_page_on_scale_is_filled() -> None:
    """A page whose prose was put together from pieces reads as one that was written by hand."""
    page = (DOCS / "scale.md").read_text()
    assert wrapped(page) == page
