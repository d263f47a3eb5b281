"""Recommendations: derived from what was measured, each with its reason in a line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rsmq.bench.meter import Cost

TYPICAL_WAIT: Final = 0.01
"""Seconds that a handler which waits for something waits: a query, a call within the data centre."""
LEAST_PARTITIONS, MOST_PARTITIONS = 8, 64
LEAST_CONCURRENCY, MOST_CONCURRENCY = 64, 1024
PER_PROCESS: Final = 4
WORTHWHILE: Final = 0.85


@dataclass(frozen=True, slots=True)
class Advice:
    """What to set, to what, and why."""

    name: str
    value: str
    reason: str


def advise(costs: Mapping[str, Cost], cores: int) -> list[Advice]:
    """For a handler that costs nothing itself: real handlers need more processes, not fewer."""
    server = 1e6 / max(0.1, costs["many"].server_us + costs["single"].server_us)
    process = 1e6 / max(0.1, costs["single"].client_us)
    processes = max(1, min(cores, math.ceil(server / process)))
    partitions = clamp(power_of_two(PER_PROCESS * processes), LEAST_PARTITIONS, MOST_PARTITIONS)
    busy = 1e6 / max(0.1, costs["suspending"].client_us)
    concurrency = clamp(power_of_two(busy * TYPICAL_WAIT), LEAST_CONCURRENCY, MOST_CONCURRENCY)
    batch = costs["batch"].client_us / max(0.1, costs["single"].client_us)
    return [
        Advice(
            "processes",
            str(processes),
            f"the server carries about {many(server)} messages/s, a process handles up to {many(process)}, "
            f"and this machine has {cores} cores",
        ),
        Advice(
            "partitions",
            str(partitions),
            f"{PER_PROCESS} a process or more, so that the shares stay even when a process is added or gone; "
            f"at least {LEAST_PARTITIONS}, for the number never changes",
        ),
        Advice(
            "concurrency",
            str(concurrency),
            f"handlers that wait {TYPICAL_WAIT * 1000:.0f} ms keep a process busy ({many(busy)}/s) with so many at "
            f"once; {LEAST_CONCURRENCY} do up to {LEAST_CONCURRENCY / busy * 1000:.1f} ms",
        ),
        Advice(
            "batch",
            "500" if batch < WORTHWHILE else "none",
            f"a message in a batch costs {batch:.2f} × a single one: "
            + ("worth it where your work can be done in batches" if batch < WORTHWHILE else "not worth it by itself"),
        ),
    ]


def power_of_two(number: float) -> int:
    """The next one upwards."""
    return 1 << max(0, math.ceil(math.log2(max(1.0, number))))


def clamp(number: int, least: int, most: int) -> int:
    """Within bounds."""
    return max(least, min(most, number))


def many(number: float) -> str:
    """A rate in two digits: more would promise what a measurement of seconds cannot keep."""
    digits = -math.floor(math.log10(number)) + 1 if number >= 1 else 0
    return f"{round(number, digits):,.0f}".replace(",", " ")
