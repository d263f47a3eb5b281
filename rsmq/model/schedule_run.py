"""The report of one run of a schedule, as the server keeps the last of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final, Literal, get_args

from pydantic_core import from_json, to_json

from rsmq.model.clock import from_epoch_ms

RunResult = Literal["published", "nothing", "failed", "full", "missed"]
"""`nothing`: the function returned None; `full`: the topic has no room; `missed`: no worker ran, and it was skipped."""
LONGEST_ERROR: Final = 300


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """One run. `tick`: the time that it was for; `at`: when it ended; both in ms since 1970 by the server's clock.

    `attempts` counts those that failed for this tick, `skipped` the ticks before it that were missed and not published.
    """

    tick: int
    at: int
    result: RunResult
    message_id: str = ""
    seconds: float = 0.0
    error: str = ""
    attempts: int = 0
    skipped: int = 0
    is_asked: bool = False
    """Whether an operator has asked for it, beside the ticks."""

    @property
    def time(self) -> datetime:
        """The time that it was for."""
        return from_epoch_ms(self.tick)

    def as_line(self) -> str:
        """As the server keeps it: the tick first, by which scripts tell runs apart."""
        return to_json(self, exclude_none=True).decode()


KINDS: Final[dict[str, type]] = {each.name: type(each.default) for each in fields(ScheduleRun)} | {
    "tick": int, "at": int, "result": str, "seconds": float
}  # fmt: skip


def short_error(error: BaseException) -> str:
    """An error in a line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= LONGEST_ERROR else f"{text[: LONGEST_ERROR - 1]}…"


def read_runs(text: str) -> Iterator[ScheduleRun]:
    """The runs of a history, oldest first. A line that is none of ours costs itself."""
    for line in text.splitlines():
        try:
            run = read_run(from_json(line))
            _ = run.time, from_epoch_ms(run.at)  # out of range?
        except (ValueError, OverflowError, OSError, TypeError):
            continue
        yield run


def read_run(given: Any) -> ScheduleRun:
    """A run from its JSON. Raises ValueError and TypeError."""
    known = {name: kind(given[name]) for name, kind in KINDS.items() if name in given}
    if known.get("result") not in get_args(RunResult):
        raise ValueError("it has no known result")
    return ScheduleRun(**known)
