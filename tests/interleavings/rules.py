"""The handler of a scenario."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from rsmq.handler.retry import RetryPolicy
from tests.interleavings.commands import POLICY


class Rules(NamedTuple):
    """The handler: a key or "" for each message, and how many calls run at once.

    `ends_late`: a member that connects again first ends its last connection, so nothing comes late on it.
    `has_outputs`: each handler publishes one message. `batch`: a call gets so many messages at most (0: one, and not as
    a batch). `is_shared`: shared distribution.
    `attempts`: how many a message has. `room`: how many of a key wait in memory, others are kept as ids (none: all of
    them are in memory). `names`: of each message, if names take turns. `without`: rules that a search leaves out.
    """

    keys: tuple[str, ...]
    concurrency: int = 1
    ends_late: bool = True
    has_outputs: bool = False
    batch: int = 0
    is_shared: bool = False
    attempts: int = 2
    room: int | None = None
    names: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()

    @property
    def policy(self) -> RetryPolicy:
        """When it is tried again."""
        return replace(POLICY, max_attempts=self.attempts)

    def blocks(self, number: int) -> bool:
        """Whether a message holds back later ones while it waits for its retry."""
        return bool(self.keys[number - 1])

    def before(self, number: int) -> tuple[int, ...]:
        """The earlier messages of its key, if they must come first."""
        key = self.keys[number - 1]
        return tuple(n for n in range(1, number) if self.keys[n - 1] == key) if self.blocks(number) else ()
