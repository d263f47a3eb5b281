"""What a machine cannot test, as one sentence at the end of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

BY_HAND: Final = ("make chaos", "CHAOS=long")
"""In the reason of a test that is for another run, not for another machine."""


def untested(skipped: Iterable[tuple[str, str]]) -> str:
    """One sentence for the skipped tests, each with its file and its reason; empty if this machine can run them all."""
    found = defaultdict[str, set[str]](set)
    for path, reason in skipped:
        if not any(each in reason for each in BY_HAND):
            found[reason.removeprefix("Skipped: ")].add(path.removeprefix("tests/").partition("/")[0])
    parts = [f"some of {', '.join(sorted(folders))} ({reason})" for reason, folders in sorted(found.items())]
    return f"Not tested on this machine (tests/README.md says what for): {'; '.join(parts)}." if parts else ""
