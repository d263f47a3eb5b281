"""Filling the paragraphs of generated pages."""

from __future__ import annotations

from benchmarks.prose import wrapped

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
