"""The documentation site: `python -m tests.site`, which `make docs` runs, builds it into site/."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

GENERATED: Final = "reference/#"
"""Where the sections of the reference are, which is made from the code."""
BEFORE: Final = "In the Python reference, which is made from the code: "
ORDER: Final = {"Learn": 0, "Do": 1, "Rely": 2, "Know": 3}


def build(root: Path) -> None:
    """Build the site of a repository. Raises RuntimeError with all that the builder says about a mistake."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=250, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    index = root / "site" / "search.json"
    index.write_text(json.dumps(guides_first(json.loads(index.read_text()))))


def guides_first(index: dict[str, Any]) -> dict[str, Any]:
    """The index of the search, so that what people have written comes before what is made from the code.

    The search ranks a section by the word's place in its title and text, and has no other weight. So the names of the
    reference move from the titles into the texts.
    """
    for item in index["items"]:
        if item["location"].startswith(GENERATED):
            name = re.sub(r"<[^>]+>", "", item["title"])
            item |= {"title": "Python reference", "path": ["Know"], "text": f"<p>{BEFORE}{name}</p>{item['text']}"}
    index["items"].sort(key=lambda item: ORDER.get(item["path"][0], 0) if item["path"] else 0)
    return index


if __name__ == "__main__":
    try:
        build(Path.cwd())
    except RuntimeError as error:
        sys.exit(str(error))
