"""`python -m tests.release.rename NAME`: give the distribution another name. The import name stays `rsmq`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.forks import ROOT

NAMED: Final = re.compile(
    r"""(?<=^name[ ]=[ ]")rsmq(?=")  # pyproject.toml
    | (?<![\w./-])rsmq(?=\\?\[[a-z])  # rsmq[mqtt]
    | (?<=--no-deps[ ])rsmq(?=[`'"])  # pip install --no-deps rsmq""",
    re.VERBOSE | re.MULTILINE,
)
"""Where the text of the repository means the distribution."""


def renamed(text: str, name: str) -> str:
    """The text with another name of the distribution."""
    return NAMED.sub(name, text)


def changes(name: str) -> Iterator[tuple[Path, str]]:
    """The files that name the distribution, with their new text."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in (ROOT / each for each in tracked.splitlines()):
        if path.suffix in {".md", ".py", ".toml", ".txt", ".yaml", ".yml", ""} and path.is_file():
            text = path.read_text(encoding="utf-8", errors="surrogateescape")
            if (new := renamed(text, name)) != text:
                yield path, new


if __name__ == "__main__":
    for path, text in changes(sys.argv[1]):
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        print(path.relative_to(ROOT))
