"""Every ACL rule of the documents is accepted by every server of this machine, also by old ones."""

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
def test_documented_acl_rules_are_accepted_by_every_server(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule names a command that the server does not know."""
    if "SERVER_BINARY" not in os.environ:
        program = executable(name)
        if program is None:
            pytest.skip(f"no {name} on this machine")
        monkeypatch.setenv("SERVER_BINARY", str(program))
    assert len(RULES) == 6
    with Server() as server, server.client() as client:
        for rule in RULES:
            client.execute_command("ACL", "SETUSER", *re.findall(r"\([^)]*\)|\S+", rule))
