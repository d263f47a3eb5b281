"""Wraps the prose of a generated page at 120 columns, as the pages written by hand are."""

from __future__ import annotations

import re
from textwrap import wrap
from typing import Final

COLUMNS: Final = 120
KEPT: Final = re.compile(r"\||#|!|<|```|    |$")
"""How a line begins that is no prose: a table, a title, a picture, a comment, code, or nothing."""
ITEM: Final = re.compile(r"(- |\d+\. )")


def wrapped(text: str) -> str:
    """The same page with its paragraphs and list items filled; an item is indented below its mark."""
    lines, paragraph, is_code = list[str](), list[str](), False

    def fill() -> None:
        item = ITEM.match(paragraph[0]) if paragraph else None
        indent, prose = " " * len(item[0] if item else ""), " ".join(each.strip() for each in paragraph)
        lines.extend(wrap(prose, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))
        paragraph.clear()

    for line in text.split("\n"):
        is_fence = line.startswith("```")
        if is_code or KEPT.match(line) or ITEM.match(line):
            fill()
        if is_code or KEPT.match(line):
            lines.append(line)
        else:
            paragraph.append(line)
        is_code = is_code != is_fence
    fill()
    return "\n".join(lines)
