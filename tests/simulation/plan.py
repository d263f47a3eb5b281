"""What a run has: members, messages, handlers. A seed varies it, because a defect often needs one particular shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rsmq.handler.options import Distribution, Ordering
from tests.simulation.world import Choices

Fault = Literal["kill", "freeze", "cut", "stop", "late"]
FAULTS: tuple[Fault, ...] = ("kill", "freeze", "cut", "stop", "late", "late")
STYLES: tuple[tuple[Ordering, Distribution, int], ...] = (
    ("key", "hash", 0), ("key", "hash", 0), ("key", "hash", 7), ("partition", "hash", 5), ("none", "hash", 0),
    ("none", "hash", 7), ("none", "shared", 0), ("none", "shared", 7),
)  # fmt: skip
"""Ordering, distribution, and the size of a batch (0: one message a call)."""


@dataclass(frozen=True)
class Plan:
    """The shape of a run. Spans are in virtual seconds.

    `noise`: the share of commands and replies that take long. `busy`: the longest a handler works. `burst`: how many
    messages are published at a time. `failing`: the share of attempts that fail.
    """

    members: int = 3
    partitions: int = 3
    keys: int = 4
    messages: int = 120
    seconds: float = 20.0
    patience: float = 120.0
    lease: float = 3.0
    ordering: Ordering = "key"
    distribution: Distribution = "hash"
    batch: int = 0
    faults: tuple[Fault, ...] = FAULTS
    failing: float = 0.1
    noise: float = 0.02
    prefetch: int = 2000
    concurrency: int = 4
    busy: float = 0.1
    burst: int = 1
    delayed: float = 0.0
    retention: float = 3600.0

    def varied(self, choices: Choices) -> Plan:
        """The same with what depends on the seed."""
        ordering, distribution, batch = choices.among(STYLES, "style")
        return replace(
            self,
            ordering=ordering,
            distribution=distribution,
            batch=batch,
            prefetch=choices.among([1, 3, 10, 2000], "prefetch"),
            concurrency=choices.among([1, 4, 16], "concurrency"),
            busy=choices.among([0.0, 0.02, 0.1, 0.4], "busy"),
            burst=choices.among([1, 1, 10, 40], "burst"),
            keys=choices.among([1, 2, 4, 12], "keys"),
            partitions=choices.among([1, 2, 3, 5], "partitions"),
            members=choices.among([2, 3, 4], "members"),
            delayed=choices.among([0.0, 0.3], "delayed") if ordering == "none" else 0.0,
            retention=choices.among([3600.0, 5.0], "retention"),
        )
