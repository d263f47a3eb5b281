"""What hatchling asks when it builds a file of a release: the README as PyPI shows it.

On GitHub a link such as `docs/mqtt.md` leads into the repository, on PyPI nowhere. There it leads to the file of the
version, at its tag.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Readme(MetadataHookInterface):
    """Gives the metadata its description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the table `project` of pyproject.toml."""
        home = f"{metadata['urls']['Source']}/blob/v{metadata['version']}"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        absolute = re.sub(r"\]\((?!https?:|#)", f"]({home}/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute}
