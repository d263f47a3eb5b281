"""Every rule of the pages, on every server that is here: one that an old server refuses is worth nothing there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import pytest

from tests.matrix.__main__ import SERVERS
from tests.matrix.cell import executable
from tests.servers import Server

DOCS: Final = Path(__file__).parents[2] / "docs"
RULES: Final = [
    rule
    for page in ("keys.md", "security.md")
    for rule in re.findall(r"^ACL SETUSER (.*?)(?=^```)", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize("name", SERVERS)
def test_rules_are_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule names a command that this server does not know."""
    if "SERVER_BINARY" not in os.environ:
        program = executable(name)
        if program is None:
            pytest.skip(f"no {name} on this machine")
        monkeypatch.setenv("SERVER_BINARY", str(program))
    assert len(RULES) == 5
    with Server() as server, server.client() as client:
        for rule in RULES:
            client.execute_command("ACL", "SETUSER", *re.findall(r"\([^)]*\)|\S+", rule))
