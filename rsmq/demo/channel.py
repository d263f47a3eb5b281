"""Three ways to reach a passenger, tried in turn: what one provider cannot deliver, the next one may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from zlib import crc32

from rsmq.demo.flight import Departure
from rsmq.retry import Retry


@dataclass(frozen=True, slots=True)
class Channel:
    """A provider that fails now and then: for a given departure and attempt always in the same way."""

    name: str
    failures_in_100: int

    def sends(self, departure: Departure, attempt: int) -> bool:
        """Whether the provider takes it."""
        return crc32(f"{self.name} {departure.number} {attempt}".encode()) % 100 >= self.failures_in_100


CHAIN: Final = (Channel("PUSH", 20), Channel("SMS", 15), Channel("AlimTalk", 10))


def notify(departure: Departure, attempt: int) -> str:
    """The name of the first channel that took it. Raises Retry when none did."""
    for channel in CHAIN:
        if channel.sends(departure, attempt):
            return channel.name
    raise Retry(f"no channel took departure {departure.number}")
