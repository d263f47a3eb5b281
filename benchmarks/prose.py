"""Wraps the prose of a generated page at 120 columns, as the pages written by hand are."""

from __future__ import annotations

import re
from textwrap import wrap
from typing import Final

COLUMNS: Final = 120
KEPT: Final = re.compile(r"\||#|!|<|```|    ")
"""How a line begins that is no prose: a table, a title, a picture, a comment, code."""


def wrapped(text: str) -> str:
    """The same page with its long lines of prose in several; a list item is indented below its mark."""
    lines, is_code = [], False
    for line in text.split("\n"):
        if line.startswith("```"):
            is_code = not is_code
        if len(line) <= COLUMNS or is_code or KEPT.match(line):
            lines.append(line)
        else:
            indent = "  " if line.startswith("- ") else ""
            lines += wrap(line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)
