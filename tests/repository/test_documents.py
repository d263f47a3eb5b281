"""What the documents say is checked: links, files and commands exist, the first program prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rsmq.cli import index

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(path for folder in ("docs", "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.md"))),
]
WIDEST = 120
LINK = re.compile(r"\]\(([^)\s]+)|^\[[^]]+\]: (\S+)", re.MULTILINE)
HOME = "https://github.com/rsmq/rsmq/blob/main/"
FILE = re.compile(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|lua|md))")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|`)rsmq ([a-z]+)(?: ([a-z][a-z-]*))?", re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """What a link may name after `#`: the headings of a page, as GitHub and the site call them."""
    is_code, found = False, Counter[str]()
    names = set(re.findall(r'(?:id|name)="([^"]+)"', page.read_text()))
    for line in page.read_text().splitlines():
        is_code ^= line.startswith("```")
        if not is_code and line.startswith("#"):
            title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip()).lower()
            name = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            names.add(f"{name}-{found[name]}" if found[name] else name)
            found[name] += 1
    return names


def broken_links(page: Path) -> Iterator[str]:
    """Relative links of a page, and links to a file of this repository, that lead nowhere."""
    for link in map("".join, LINK.findall(page.read_text())):
        path, _, anchor = link.removeprefix(HOME).partition("#")
        if path.startswith(("http:", "https:", "mailto:")):
            continue
        target = ROOT / path if link.startswith(HOME) else page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield link


def test_a_link_into_the_project_leads_to_a_file_and_a_heading() -> None:
    """Every relative link, and every one to a file of this repository, names what is there."""
    assert {str(page): found for page in PAGES if (found := list(broken_links(page)))} == {}


def missing_files(page: Path) -> set[str]:
    """The files that a page has in backticks and that are not there."""
    lua = ROOT / "rsmq" / "redis" / "lua"
    homes = (ROOT, ROOT / "rsmq", *lua.iterdir(), ROOT / "docs", page.parent)
    named = set(FILE.findall(page.read_text())) - {"manage.py"}  # that of a Django project
    return {name for name in named if not any((home / name).exists() for home in homes)}


def test_a_file_in_backticks_exists() -> None:
    """A file in backticks is there: from the root, in the package, beside the scripts, or in the documents."""
    assert {str(page): found for page in PAGES if (found := missing_files(page))} == {}


def prose(text: str) -> Iterator[str]:
    """The lines of a page that can be wrapped: no code, no row of a table, not a single long word."""
    is_code = False
    for line in text.splitlines():
        is_fence = line.lstrip().startswith("```")
        if not (is_code or is_fence or line.startswith("|")) and " " in line.strip().lstrip("- "):
            yield line
        is_code ^= is_fence


def test_a_line_of_prose_has_at_most_120_columns() -> None:
    """A page can be read in a terminal and in a diff."""
    assert [(page.name, line) for page in PAGES for line in prose(page.read_text()) if len(line) > WIDEST] == []


def uneven_rows(page: Path) -> Iterator[str]:
    """Rows of a table with another number of cells than its head: they were written into the wrong table."""
    cells = 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        found = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        if found and cells and found != cells:
            yield f"{page.relative_to(ROOT)}:{number} has {found - 1} cells, and the head of its table {cells - 1}"
        cells = (cells or found) if found else 0


def test_a_row_of_a_table_has_the_cells_of_its_head() -> None:
    assert [each for page in PAGES for each in uneven_rows(page)] == []


def unknown_commands(text: str) -> Iterator[str]:
    """The commands, and verbs of nouns, that a page names and the index of the command line does not have."""
    typed = [*FENCE.findall(text), *re.findall("`[^`]+`", FENCE.sub("", text))]
    for name, verb in COMMAND.findall("\n".join(typed)):
        entry = index.top(name)
        if entry is None or verb not in ("", *entry.get("commands", (verb,))):
            yield f"rsmq {name} {verb}"


def test_a_named_command_exists() -> None:
    """Each `rsmq NOUN VERB` in the documents, and in those of the examples."""
    pages = [*PAGES, *sorted((ROOT / "examples").rglob("*.md"))]
    assert {str(page): found for page in pages if (found := list(unknown_commands(page.read_text())))} == {}
    wrong = "rsmq is good: `rsmq hold strat`, not `rsmq top orders`, or\n\n```\nrsmq wroker app:broker\n```\n"
    assert sorted(unknown_commands(wrong)) == ["rsmq hold strat", "rsmq wroker app"]


OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
OF_OTHERS = {
    "--preload", "--graceful-timeout", "--ws-ping-interval", "--max-async-tasks", "--dead-message-ttl",
    "--autogenerate", "--archives", "--find-links", "--rsmq-url", "--moves", "--hot", "--cluster", "--help",
}  # fmt: skip
"""Options of other programs, of pytest and of our benchmarks."""


@cache
def options_by_command() -> dict[tuple[str, ...], set[str]]:
    """What each command takes, by its words."""
    found = dict[tuple[str, ...], set[str]]()
    for name, entry in index.read().items():
        for verb, inner in entry.get("commands", {"": entry}).items():
            names = {part for option in inner.get("options", ()) for part in re.split("[ /]", option)}
            found[(name, verb) if verb else (name,)] = names | {"--help"}
    return found


def wrong_options(page: Path) -> Iterator[str]:
    """Options that a page gives to a command of rsmq which does not have them, or that no command has."""
    text, known = page.read_text(), options_by_command()
    spans = re.findall(r"`((?:rsmq |--)[^`]+)`", text)
    for code in (*spans, *re.findall(r"^(rsmq [^|\n]+)", text, re.MULTILINE)):
        words = code.split()
        taken = known.get(tuple(words[1:3])) or known.get(tuple(words[1:2])) or set().union(*known.values()) | OF_OTHERS
        yield from (f"{each} in `{code}`" for each in OPTION.findall(code) if each not in taken)


def test_a_named_option_exists() -> None:
    """Each option in the documents is one of the command before it; one that stands alone, of any."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert {page.name: found for page in pages if (found := list(wrong_options(page)))} == {}


def test_an_option_that_no_command_has_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Not `--retained-limit`, but `--most-retained`; `rsmq topic list --yes`\n\nrsmq top --onec # all\n")
    assert [each.split()[0] for each in wrong_options(page)] == ["--retained-limit", "--yes", "--onec"]


def test_the_first_program_prints_the_output_of_the_readme(tmp_path: Path) -> None:
    """The program at the top of the README, as it stands there, on an embedded server."""
    text = (ROOT / "README.md").read_text()
    program, output = (text.split(fence, 1)[1].split("```", 1)[0] for fence in ("```python\n", "```\n\n```\n"))
    (tmp_path / "first.py").write_text(program)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RSMQ_")}
    environment |= {"XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "first.py"], cwd=tmp_path, env=environment, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == (output, 0), done.stderr


def test_a_worker_that_imports_the_first_program_starts_nothing_else(tmp_path: Path) -> None:
    """`rsmq worker app:broker` imports it in each process: before, each published the order again, and served alone."""
    program = (ROOT / "README.md").read_text().split("```python\n", 1)[1].split("```", 1)[0]
    (tmp_path / "first.py").write_text(program)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RSMQ_")}
    environment |= {"XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", "import first"], cwd=tmp_path, env=environment, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode, (tmp_path / "state").exists()) == ("", 0, False), done.stderr


def test_the_readme_shows_a_short_program_by_line_12() -> None:
    """One sentence, then about ten lines of code, then their output; the whole page has at most 150 lines."""
    lines = (ROOT / "README.md").read_text().splitlines()
    start = lines.index("```python")
    program = lines[start + 1 : lines.index("```", start)]
    assert start < 12
    assert len([line for line in program if line]) <= 10
    assert len(lines) <= 150


UNDER_WAY = ("0025", "0026", "0027", "0028", "0029", "0030", "0032", "0034", "0035")
"""Numbers of decisions that are being written while later ones are there already."""


def test_decisions_are_numbered_without_a_gap() -> None:
    """One number each, without a gap, and the title repeats it."""
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [page.name[:4] for page in pages]
    assert len(set(numbers)) == len(numbers)
    given = sorted({*numbers, *UNDER_WAY})
    assert given == [f"{number:04}" for number in range(1, len(given) + 1)]
    assert all(page.read_text().startswith(f"# {page.name[:4]} ") for page in pages)
