"""`python -m tests.release.rename NAME`: give the distribution another name. The import name stays `rsmq`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rsmq.model.distribution import OWN
from tests.forks import ROOT

NAME: Final = re.escape(OWN)
NAMED: Final = rf"""(?<=^name[ ]=[ ]"){NAME}(?=")  # pyproject.toml
    | (?<=^OWN:[ ]Final[ ]=[ ]"){NAME}(?=")  # the constant from which the package and the tests have it
    | (?<![\w./-]){NAME}(?=\\?\[[a-z])  # rsmq[mqtt]
    | (?<=--no-deps[ ]){NAME}(?=[`'"])  # pip install --no-deps rsmq"""
"""Where the text of the repository means the distribution."""


def renamed(text: str, name: str) -> str:
    """The text with another name of the distribution."""
    return re.sub(NAMED, name, text, flags=re.VERBOSE | re.MULTILINE)


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
