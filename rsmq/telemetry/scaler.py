"""Answers `/scale` of the exporter: how many workers a group needs, for an autoscaler that asks again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from rsmq.errors import ConfigError, RsmqError
from rsmq.inspector.observer import Observer
from rsmq.inspector.scale import Goal, decide, load_of
from rsmq.inspector.state import Snapshot
from rsmq.inspector.trend import Board, compare
from rsmq.model.clock import monotonic
from rsmq.model.duration import parse_duration

SHORTEST: Final = 5.0
"""Seconds that rates are measured over, at least: autoscalers ask every 15 to 30 s."""
MOST_WORKERS: Final = 100_000
OPTIONS: Final = ("topic", "group", "drain", "min", "max")


class NotKnown(RsmqError):
    """There is no such group."""


class Scaler:
    """Keeps two snapshots for the rates, and for each group the best rate of a worker."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._lock = asyncio.Lock()
        self._before: Snapshot | None = None
        self._after: Snapshot | None = None
        self._best: dict[tuple[str, str], float | None] = {}

    async def answer(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The answer to one question. Raises ConfigError, NotKnown, and what the connection raises."""
        unknown = sorted(set(query) - set(OPTIONS))
        if unknown:
            raise ConfigError(f"unknown: {', '.join(unknown)}; there are {', '.join(OPTIONS)}")
        topic, name, goal = query.get("topic", ""), query.get("group", ""), goal_of(query)
        board = await self._board()
        group = next((each for each in board.groups if (each.topic, each.name) == (topic, name)), None)
        if group is None:
            raise NotKnown(f"there is no group {name!r} of topic {topic!r}")
        load = load_of(next((each for each in board.topics if each.name == topic), None), group)
        wanted = decide(load, goal, self._best.get((topic, name)))
        self._best[topic, name] = wanted.best
        return {
            "workers": wanted.workers, "why": wanted.why, "waiting": load.waiting, "delayed": load.delayed,
            "oldest_seconds": load.oldest.total_seconds(), "now": load.workers, "partitions": load.partitions,
        }  # fmt: skip

    async def _board(self) -> Board:
        async with self._lock:
            if self._after is None or monotonic() - self._after.at >= SHORTEST:
                self._before = self._after
                self._after = await self._observer.snapshot()
            return compare(self._before, self._after)

    def __repr__(self) -> str:
        return f"<Scaler of {len(self._best)} groups>"


def goal_of(query: Mapping[str, str]) -> Goal:
    """The target that the query asks for. Raises ConfigError."""
    drain = Goal().drain
    if "drain" in query:
        try:
            drain = parse_duration(query["drain"])
        except ValueError:
            raise ConfigError(f"drain={query['drain'][:40]!r} is not a duration: write 60s or PT1M") from None
        if drain.total_seconds() <= 0:
            raise ConfigError("drain must be longer than 0 s")
    return Goal(drain, number_of(query, "min") or 0, number_of(query, "max"))


def number_of(query: Mapping[str, str], name: str) -> int | None:
    """A number of workers, or None. Raises ConfigError."""
    text = query.get(name)
    if text is None:
        return None
    if not (text.isdecimal() and len(text) < 7 and int(text) <= MOST_WORKERS):
        raise ConfigError(f"{name}={text[:40]!r} is not a number of workers")
    return int(text)
