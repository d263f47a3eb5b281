"""The sections of a page that benchmarks write: each between two marks; the text around them is written by hand."""

from __future__ import annotations

from pathlib import Path

from benchmarks.prose import wrapped


def marks(name: str) -> tuple[str, str]:
    """The lines around the section of a benchmark."""
    return f"<!-- measured: {name} -->", f"<!-- end: {name} -->"


def section(page: Path, name: str) -> str:
    """What stands between the marks. Raises ValueError if the page has not one pair of them, in this order."""
    begin, end = marks(name)
    text = page.read_text(encoding="utf-8")
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
        raise ValueError(f"{page} has no single section between {begin} and {end}")
    return text.partition(begin)[2].partition(end)[0].strip("\n")


def rewrite(page: Path, name: str, text: str) -> None:
    """Replace what stands between the marks, and nothing else; its prose is wrapped."""
    old, (begin, end) = section(page, name), marks(name)
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    assert old in rest
    after = rest.partition(end)[2]
    new = wrapped(text.strip("\n"))
    page.write_text(f"{before}{begin}\n\n{new}\n\n{end}{after}", encoding="utf-8")
