"""The load: how many messages of which size, the same for all trials."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

TOPIC: Final = "bench"
KEYS: Final = 1000
"""Ordering keys that the messages are spread over."""
OVERHEAD: Final = len('{"n":100000,"pad":""}k999')
"""Bytes of a payload beside the padding."""
WARM: Final = 5
"""The warm-up is this fraction (1 / WARM) of a measurement: connections, imports, the first batches."""


LAYOUTS: Final = {"own": ("data", "id", "key"), "key": ("data", "key"), "data": ("data",)}
"""The fields of a message: of our own producers, and of a plain XADD with and without a key."""


class BenchItem(BaseModel):
    """The payload as a model."""

    n: int
    pad: str


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """`size`: bytes of a payload; `concurrency`: publishers, or suspending handlers, at the same time.

    `layout`: which fields the messages have. Each layout has a topic of its own.
    """

    url: str
    prefix: str
    count: int = 20_000
    size: int = 200
    partitions: int = 8
    concurrency: int = 64
    layout: str = "own"

    @property
    def topic(self) -> str:
        """The topic with messages of this layout."""
        return TOPIC if self.layout == "own" else f"{TOPIC}-{self.layout}"

    @property
    def warm(self) -> int:
        """Messages of the warm-up."""
        return max(1, self.count // WARM)

    def payloads(self, count: int) -> Iterator[dict[str, Any]]:
        """The payloads to publish."""
        pad = "x" * max(0, self.size - OVERHEAD)
        return ({"n": n, "pad": pad} for n in range(count))


def key_of(payload: dict[str, Any]) -> str:
    """The ordering key of a message."""
    return f"k{payload['n'] % KEYS}"
