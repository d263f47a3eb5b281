"""Vulnerabilities that let a client take over the server, and the versions that have them. No I/O.

From the projects' own release notes. A branch older than all fixed ones gets no fix, a newer one needs none. Only
versions are compared: distributions fix vulnerabilities in their packages without changing the version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Version = tuple[int, int, int]
Branch = tuple[int, int]
Fixes = Mapping[Branch, int]
"""Branch -> the first fixed patch version."""

NEVER: Final[Fixes] = {}


@dataclass(frozen=True, slots=True)
class Vulnerability:
    """`redis` and `valkey` hold its fixes, empty for a server that never had it; `since` is of Redis."""

    name: str
    redis: Fixes
    valkey: Fixes
    since: Version = (0, 0, 0)

    def is_in(self, kind: str, version: Version) -> bool:
        """Whether this version of a server has it."""
        fixes = self.redis if kind == "redis" else self.valkey
        branch = version[:2]
        if not fixes or (kind == "redis" and version < self.since):
            return False
        if branch in fixes:
            return version[2] < fixes[branch]
        return branch < max(fixes)


VULNERABILITIES: Final = (
    Vulnerability(
        "CVE-2025-49844 (a script runs code)", {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2}, {(8, 1): 4}
    ),
    Vulnerability("CVE-2025-62507 (XACKDEL runs code)", {(8, 2): 3}, NEVER, since=(8, 2, 0)),
    Vulnerability(
        "CVE-2026-23479 (a blocked client runs code)",
        {(7, 4): 9, (8, 2): 6, (8, 4): 3, (8, 6): 3},
        {(7, 2): 13, (8, 0): 8, (8, 1): 7, (9, 0): 4},
        since=(7, 2, 0),
    ),
    Vulnerability(
        "CVE-2026-23631 (a script uses freed memory)",
        {(7, 4): 9, (8, 2): 6, (8, 4): 3, (8, 6): 3},
        {(7, 2): 13, (8, 0): 8, (8, 1): 7, (9, 0): 4},
    ),
    Vulnerability("RESTORE of a stream (uses freed memory)", {(7, 4): 10, (8, 2): 8, (8, 4): 5}, NEVER),
    Vulnerability(
        "redis#15478 (XREADGROUP ignores the key rules of an ACL)",
        {(7, 4): 11, (8, 2): 9, (8, 4): 6, (8, 6): 6, (8, 8): 2},
        NEVER,
    ),
)
OTHERS: Final = ("dragonfly_version", "garnet_version", "kvrocks_version")
"""Fields of INFO that only other servers have. Their redis_version names the version of Redis that they emulate."""


def identify(info: Mapping[str, str]) -> tuple[str, Version] | None:
    """`redis` or `valkey` and its version, or None for anything else. Valkey's redis_version is always 7.2.4."""
    if any(mark in info for mark in OTHERS):
        return None
    kind = "valkey" if "valkey_version" in info or info.get("server_name") == "valkey" else "redis"
    found = re.match(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})", info.get(f"{kind}_version", ""))
    return None if found is None else (kind, (int(found[1]), int(found[2]), int(found[3])))


def vulnerabilities_of(info: Mapping[str, str]) -> list[Vulnerability] | None:
    """The known vulnerabilities of a server with this INFO; None for an unknown kind or version of server."""
    server = identify(info)
    return None if server is None else [each for each in VULNERABILITIES if each.is_in(*server)]


def upgrade(info: Mapping[str, str], found: Sequence[Vulnerability]) -> str:
    """The advice: the first version of the branch with all fixes, else the newest branch."""
    server = identify(info)
    assert server is not None, "no vulnerability is known for an unknown server"
    kind, version = server
    fixes = [each.redis if kind == "redis" else each.valkey for each in found]
    branch = version[:2]
    if all(branch in each for each in fixes):
        return f"upgrade to {branch[0]}.{branch[1]}.{max(each[branch] for each in fixes)} or newer"
    newest = max(branch for each in fixes for branch in each)
    patch = max(each.get(newest, 0) for each in fixes)
    return f"this branch gets no fixes: upgrade to {newest[0]}.{newest[1]}.{patch} or newer"
