"""The pages of the documentation: `python -m tests.pages` counts them and writes docs/llms.txt from the navigation.

llms.txt is for programs that read documentation: one line a page, with an address where it is plain Markdown.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
LLMS: Final = DOCS / "llms.txt"
RAW: Final = "https://raw.githubusercontent.com/rsmq/rsmq/main/docs/"
KINDS: Final = ("for users", "decisions", "written from the code")


def navigation() -> Iterator[tuple[str, str, str]]:
    """Section, title and path of each page, in the order of the site; decisions have no title of their own."""
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]

    def walk(node: object, section: str, title: str) -> Iterator[tuple[str, str, str]]:
        if isinstance(node, str):
            yield section, title, node
        elif isinstance(node, dict):
            for name, inner in node.items():
                yield from walk(inner, section if section else name if isinstance(inner, list) else "", name)
        elif isinstance(node, list):
            for inner in node:
                yield from walk(inner, section, title)

    yield from walk(nav, "", "")


def title_of(path: str) -> str:
    """The heading of a page."""
    return (DOCS / path).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").strip()


def about(path: str) -> str:
    """The first sentence of a page, without links; its heading where the page begins with code, a table or a list."""
    prose = re.split(r"\n\s*\n", (DOCS / path).read_text(encoding="utf-8"))[1]
    plain = re.sub(r"\[([^]]*)\](?:\([^)]*\)|\[[^]]*\])", r"\1", " ".join(prose.split())).replace("**", "")
    sentence = re.split(r"(?<=[.?!])\s", plain, maxsplit=1)[0]
    return title_of(path) if prose.startswith(("```", "|")) or sentence.endswith(":") else sentence.rstrip(".")


def llms() -> str:
    """The text of llms.txt."""
    description = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["site_description"]
    lines, last = ["# rsmq", "", *textwrap.wrap(f"> {description}", 119, subsequent_indent="> ")], ""
    for section, title, path in navigation():
        is_decision = path.startswith("decisions/")
        if path == "index.md" or (is_decision and last == "Decisions"):
            continue
        heading = "Decisions" if is_decision else section
        if heading != last:
            lines += ["", f"## {heading}", ""]
            last = heading
        if is_decision:
            lines.append("- [Why it is built as it is](https://github.com/rsmq/rsmq/tree/main/docs/decisions)")
        else:
            lines.append(f"- [{title}]({RAW}{path}): {about(path)}")
    return "\n".join(lines) + "\n"


def kind(path: str) -> str:
    """What a page is for."""
    return KINDS[1] if path.startswith("decisions/") else KINDS[2] if path == "reference.md" else KINDS[0]


def counts(texts: dict[str, str]) -> dict[str, tuple[int, int]]:
    """Pages and words of each kind."""
    found = dict.fromkeys(KINDS, (0, 0))
    for path, text in texts.items():
        pages, words = found[kind(path)]
        found[kind(path)] = pages + 1, words + len(text.split())
    return found


def now() -> dict[str, str]:
    """The pages as they are."""
    return {str(path.relative_to(DOCS)): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}


def at(commit: str) -> dict[str, str]:
    """The pages of a commit."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    names = git("ls-tree", "-r", "--name-only", commit, "docs").split()
    return {name.removeprefix("docs/"): git("show", f"{commit}:{name}") for name in names if name.endswith(".md")}


def main(commits: list[str]) -> None:
    """Write, and print the counts of now beside those of some commits."""
    LLMS.write_text(llms(), encoding="utf-8")
    columns = {commit: counts(at(commit)) for commit in commits} | {"now": counts(now())}
    print("pages, words".ljust(24), *(name[:14].rjust(14) for name in columns))
    for each in KINDS:
        print(each.ljust(24), *(f"{found[each][0]:>5} {found[each][1]:>8,}" for found in columns.values()))
    sums = [tuple(map(sum, zip(*found.values(), strict=True))) for found in columns.values()]
    print("all".ljust(24), *(f"{pages:>5} {words:>8,}" for pages, words in sums))


if __name__ == "__main__":
    main(sys.argv[1:])
