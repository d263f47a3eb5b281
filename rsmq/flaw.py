"""Flaws of servers by which somebody who may connect takes over: which version has which. No I/O.

From the projects' own release notes. A branch that is older than the fixed ones gets no fix; a newer one is not in need
of it. Only a number is compared here: distributions mend flaws in their packages and keep the number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Version = tuple[int, int, int]
Branch = tuple[int, int]
Fixes = Mapping[Branch, int]
"""The branch of a version, and the first patch in which it is mended."""

NEVER: Final[Fixes] = {}


@dataclass(frozen=True, slots=True)
class Flaw:
    """One flaw. `redis` and `valkey` hold its fixes, empty where that server does not have it; `since` is Redis's."""

    name: str
    redis: Fixes
    valkey: Fixes
    since: Version = (0, 0, 0)

    def is_in(self, kind: str, version: Version) -> bool:
        """Whether a server of this version has it."""
        fixes = self.redis if kind == "redis" else self.valkey
        branch = version[:2]
        if not fixes or (kind == "redis" and version < self.since):
            return False
        if branch in fixes:
            return version[2] < fixes[branch]
        return branch < max(fixes)

    def __str__(self) -> str:
        return self.name


FLAWS: Final = (
    Flaw(
        "CVE-2025-49844 (a script runs code)",
        {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
        {(8, 1): 4},
    ),
    Flaw("CVE-2025-62507 (XACKDEL runs code)", {(8, 2): 3}, NEVER, since=(8, 2, 0)),
    Flaw(
        "CVE-2026-23479 (a blocked client runs code)",
        {(7, 4): 9, (8, 2): 6, (8, 4): 3, (8, 6): 3},
        {(7, 2): 13, (8, 0): 8, (8, 1): 7, (9, 0): 4},
        since=(7, 2, 0),
    ),
    Flaw(
        "CVE-2026-23631 (a script uses freed memory)",
        {(7, 4): 9, (8, 2): 6, (8, 4): 3, (8, 6): 3},
        {(7, 2): 13, (8, 0): 8, (8, 1): 7, (9, 0): 4},
    ),
    Flaw("RESTORE of a stream (uses freed memory)", {(7, 4): 10, (8, 2): 8, (8, 4): 5}, NEVER),
    Flaw(
        "redis#15478 (XREADGROUP passes by the key rules of an ACL)",
        {(7, 4): 11, (8, 2): 9, (8, 4): 6, (8, 6): 6, (8, 8): 2},
        NEVER,
    ),
)
OTHERS: Final = ("dragonfly_version", "garnet_version", "kvrocks_version")
"""What servers of other makes say in INFO: their redis_version says what they imitate."""


def identify(info: Mapping[str, str]) -> tuple[str, Version] | None:
    """`redis` or `valkey` and its version, or None for anything else. Valkey's redis_version is always 7.2.4."""
    if any(mark in info for mark in OTHERS):
        return None
    kind = "valkey" if "valkey_version" in info or info.get("server_name") == "valkey" else "redis"
    found = re.match(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})", info.get(f"{kind}_version", ""))
    return None if found is None else (kind, (int(found[1]), int(found[2]), int(found[3])))


def flaws_of(info: Mapping[str, str]) -> list[Flaw] | None:
    """The known flaws of the server that says this in INFO; None when it is not known what it is."""
    server = identify(info)
    return None if server is None else [flaw for flaw in FLAWS if flaw.is_in(*server)]


def upgrade(info: Mapping[str, str], found: Sequence[Flaw]) -> str:
    """What to do about them: the smallest step within the branch that mends all, or a newer branch."""
    server = identify(info)
    assert server is not None, "what is not known has no known flaws"
    kind, version = server
    fixes = [flaw.redis if kind == "redis" else flaw.valkey for flaw in found]
    branch = version[:2]
    if all(branch in each for each in fixes):
        return f"upgrade to {branch[0]}.{branch[1]}.{max(each[branch] for each in fixes)} or newer"
    newest = max(branch for each in fixes for branch in each)
    patch = max(each.get(newest, 0) for each in fixes)
    return f"this branch gets no fixes: upgrade to {newest[0]}.{newest[1]}.{patch} or newer"
