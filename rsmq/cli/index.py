"""The index of the command line: names, help and options of all commands of this distribution, without importing them.

`rsmq --help`, `rsmq topic --help` and the shell's completion read it, and take a fifth of the time. It is written by
`python -m rsmq.cli.write_index`, and a test compares it with the commands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

Entry = Mapping[str, Any]
"""`help`; a noun has its `commands` by name, a command its `options`: by names, what each takes and its help."""

FILE: Final = Path(__file__).with_name("index.json")


@cache
def read() -> dict[str, Entry]:
    """The entries by name."""
    found: dict[str, Entry] = json.loads(FILE.read_bytes())
    return found


def top(name: str) -> Entry | None:
    """The entry of a command or noun, if it is of this distribution."""
    return read().get(name)
