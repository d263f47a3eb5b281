"""The page about security, read once."""

from __future__ import annotations

from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
