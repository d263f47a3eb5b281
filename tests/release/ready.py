"""`python -m tests.release.ready v0.1.0`: may this tag publish these sources? It needs the standard library only."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path


def obstacles(tag: str, root: Path) -> Iterator[str]:
    """What is in the way, in a sentence each. A version can be published once: what is wrong in it stays wrong."""
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if tag != f"v{version}":
        yield f"the tag is {tag}, and pyproject.toml says {version}: tag v{version}, or change the version"
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(heading, (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE):
        yield f"CHANGELOG.md has no heading with a date: ## [{version}] - YYYY-MM-DD"
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        if "not on PyPI" in page.read_text(encoding="utf-8"):
            yield f"{page.relative_to(root)} says that rsmq is not on PyPI: say how to install it from there"


if __name__ == "__main__":
    sys.exit("\n".join(obstacles(sys.argv[1], Path(__file__).parents[2])) or None)
