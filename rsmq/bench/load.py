"""The load: how many messages of which size, the same for everything that is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

TOPIC: Final = "bench"
KEYS: Final = 1000
"""Ordering keys that the messages are spread over."""
OVERHEAD: Final = len('{"n":100000,"pad":""}k999')
"""What the payload limit counts beside the padding."""
WARM: Final = 5
"""One part in so many of each measurement comes before it: connections, imports, the first batches."""


class Item(BaseModel):
    """The payload as a model."""

    n: int
    pad: str


@dataclass(frozen=True, slots=True)
class Load:
    """Where and how much. `size`: bytes of a payload; `concurrency`: publishers, or handlers that suspend, at once."""

    url: str
    prefix: str
    count: int = 20_000
    size: int = 200
    partitions: int = 8
    concurrency: int = 64

    @property
    def warm(self) -> int:
        """Messages before the clock starts."""
        return max(1, self.count // WARM)

    def payloads(self, count: int) -> Iterator[dict[str, Any]]:
        """What is published."""
        pad = "x" * max(0, self.size - OVERHEAD)
        return ({"n": n, "pad": pad} for n in range(count))


def key_of(payload: dict[str, Any]) -> str:
    """The ordering key of a message."""
    return f"k{payload['n'] % KEYS}"
