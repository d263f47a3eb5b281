"""How long a member has settled nothing although it has something to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rsmq.model.work import Work

ENDINGS: Final = ("settled", "buried", "handed_on", "cancelled", "expired", "trimmed", "lost_body")
"""What takes a message out of the backlog, among the counts of a member."""


class Standstill:
    """Asked at each beat, by one thread."""

    __slots__ = ("_ended", "_ended_at", "_since")

    def __init__(self) -> None:
        self._ended = 0
        self._ended_at: float | None = None
        self._since: float | None = None

    def seconds(self, stats: Mapping[str, int], work: Work, now: float) -> float | None:
        """The time since a message left the backlog. While messages are ready, or wait for their key, the time before
        the first look that saw such ones does not count. None: nothing has happened, and there is nothing to do."""
        ended = sum(stats.get(name, 0) for name in ENDINGS)
        if ended != self._ended:
            self._ended = ended
            self._ended_at, self._since = now, None
        if not has_work(work):
            self._since = None
            return None if self._ended_at is None else now - self._ended_at
        if self._since is None:
            self._since = now
        return now - self._since

    def __repr__(self) -> str:
        return f"<Standstill since={self._since}>"


def has_work(work: Work) -> bool:
    """Whether messages are ready, or wait for a key: they should be done one after the other."""
    return bool(work.ready or work.waiting_for_key)
