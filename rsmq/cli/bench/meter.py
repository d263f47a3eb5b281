"""Costs per message: CPU time of this process and of the server, and commands. Other load does not change these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter, process_time
from typing import Final

from rsmq.redis.client.connector import Client

BY_HAND: Final = ("xadd", "xack", "xreadgroup", "set", "zadd", "hset", "pexpireat")
OURS: Final = ("evalsha", "eval", "xadd", "xreadgroup")
"""The commands that a client sends for messages. The server also counts the commands that scripts call."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Per message: microseconds of CPU of this process and of the server, commands sent; and messages a second."""

    client_us: float
    server_us: float
    commands: float
    rate: float


def best(costs: Sequence[Cost]) -> Cost:
    """The lowest of each figure and the highest rate: other load on the machine can only add to a cost."""
    rows = [asdict(cost) for cost in costs]
    least = {name: min(row[name] for row in rows) for name in rows[0]}
    return Cost(**least | {"rate": max(row["rate"] for row in rows)})


class CpuReading:
    """The CPU time of this process and the clock at one moment."""

    __slots__ = ("at", "cpu", "done")

    def __init__(self, done: int = 0) -> None:
        self.done = done
        self.cpu = process_time()
        """Seconds of CPU of this process."""
        self.at = perf_counter()
        """Seconds of the clock on the wall."""


class Meter:
    """Reads the server's own figures, which include all work of the server."""

    def __init__(self, client: Client, sent: Sequence[str] = OURS) -> None:
        self._client, self._sent = client, sent
        self._cpu = 0.0
        self._calls = 0.0

    async def start(self) -> None:
        """Start counting."""
        self._cpu, self._calls = await self._read()

    async def cost(self, start: CpuReading, end: CpuReading) -> Cost:
        """The cost per message between two marks; the server's since `start()`."""
        cpu, calls = await self._read()
        count = max(1, end.done - start.done)
        return Cost(
            client_us=(end.cpu - start.cpu) / count * 1e6,
            server_us=(cpu - self._cpu) / count * 1e6,
            commands=(calls - self._calls) / count,
            rate=count / max(1e-9, end.at - start.at),
        )

    async def _read(self) -> tuple[float, float]:
        figures = dict(await self._info("cpu"))
        calls = 0
        for name, stats in await self._info("commandstats"):
            if name.removeprefix("cmdstat_") in self._sent:
                calls += int(stats.partition("calls=")[2].partition(",")[0])
        return float(figures["used_cpu_user"]) + float(figures["used_cpu_sys"]), calls

    async def _info(self, section: str) -> list[tuple[str, str]]:
        text = (await self._client.execute_command("INFO", section)).decode()
        pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
        return [(name, value) for name, _, value in pairs]
