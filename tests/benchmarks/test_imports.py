"""The benchmarks run by hand, and use rsmq as a user does: what they import must be there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if not path.name.startswith("__")
]


@pytest.mark.parametrize("name", MODULES)
def test_imports_what_is_there(name: str) -> None:
    """Only a peer's own package may be missing: each is installed in an environment of its own."""
    missing = ""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or "?").partition(".")[0]
    assert not missing or name.startswith("benchmarks.peers.systems."), missing
    assert missing not in ("rsmq", "benchmarks")
