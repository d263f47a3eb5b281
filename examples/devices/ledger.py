"""What the gateways record about the phones, in a ledger of `rsmq.testing` outside the server under test.

A gateway writes a line before it acknowledges a letter: a killed process loses none of the lines it has written.
"""

import time
from dataclasses import dataclass
from typing import Self

CONNECTED, LEFT, NEW, AGAIN = "connected", "left", "new", "again"
FILE = "ledger"


@dataclass(frozen=True, slots=True)
class Entry:
    """One event of a phone: it connected, it left, or it received a letter, NEW or (marked as redelivered) AGAIN."""

    at_ms: float
    event: str
    phone: str
    seq: int = 0
    flight: int = 0
    published_ms: float = 0

    @classmethod
    def now(cls, event: str, phone: str, seq: int = 0, flight: int = 0, published_ms: float = 0) -> Self:
        """An event at this moment."""
        return cls(time.time() * 1000, event, phone, seq, flight, published_ms)
