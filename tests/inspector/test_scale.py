"""How many workers a group needs: single loads, and a simulated day."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rsmq.inspector.scale import Goal, GroupLoad, ScaleAnswer, decide

NOTHING = timedelta(0)
LOAD = GroupLoad(waiting=0, delayed=0, oldest=NOTHING, rate_in=0.0, rate_out=0.0, workers=0, partitions=8)
BUSY = replace(LOAD, waiting=600, oldest=timedelta(seconds=30), rate_in=10.0, rate_out=10.0, workers=1)


@pytest.mark.parametrize(
    ("load", "goal", "workers"),
    [
        (LOAD, Goal(), 0), (LOAD, Goal(least=2), 2), (replace(LOAD, delayed=1), Goal(), 1),
        (replace(LOAD, waiting=1), Goal(), 1), (replace(LOAD, rate_in=None, workers=3), Goal(), 3),
        (replace(LOAD, rate_in=None, waiting=1), Goal(), 1), (BUSY, Goal(), 3), (BUSY, Goal(most=2), 2),
        (BUSY, Goal(timedelta(seconds=6)), 8), (replace(BUSY, is_shared=True), Goal(timedelta(seconds=6)), 12),
        (replace(BUSY, is_paused=True, workers=4), Goal(), 4), (replace(LOAD, rate_in=0.01), Goal(), 1),
        (replace(LOAD, rate_in=5.0, rate_out=5.0, workers=4), Goal(), 3),
    ],
)  # fmt: skip
def test_load_needs_so_many_workers(load: GroupLoad, goal: Goal, workers: int) -> None:
    """Zero when there is nothing to do, never more than partitions, and as many as there are when it is not known."""
    found = decide(load, goal, None)
    assert found.workers == workers, found


@given(
    st.integers(0, 10**9), st.integers(0, 10), st.floats(0, 1e6), st.none() | st.floats(0, 1e6),
    st.none() | st.floats(0, 1e6), st.integers(0, 1000), st.integers(1, 64), st.none() | st.floats(1e-6, 1e6),
)  # fmt: skip
@example(1, 0, 2.0, 1.0, 5e-324, 2, 1, None)  # a rate so small that the share of one of two workers is 0.0
def test_answer_is_within_its_bounds_for_any_load(
    waiting: int, delayed: int, age: float, rate_in: float | None, rate_out: float | None, workers: int,
    partitions: int, best: float | None,
) -> None:  # fmt: skip
    """What waits has a worker, and no worker is without a partition."""
    load = GroupLoad(waiting, delayed, timedelta(seconds=age), rate_in, rate_out, workers, partitions)
    found = decide(load, Goal(), best)
    assert 0 <= found.workers <= partitions
    assert found.workers > 0 or not (waiting or delayed)
    assert found.best is None or found.best >= 0


STEP = 15
"""Seconds between two questions of the autoscaler."""
START = 30
"""Seconds until a new worker works."""


@dataclass
class Day:
    """A queue whose workers settle 20 messages a second each, 8 after noon; an autoscaler obeys the answers.

    As the manifests say: more at once, fewer only when it was so for five minutes.
    """

    least: int = 0
    backlog: float = 0.0
    workers: int = 0
    coming: list[tuple[int, int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)

    def rate_in(self, second: int) -> float:
        """Nothing at night, a wave at day, and a burst at 15:00."""
        hour = second / 3600
        wave = 60 * math.sin(math.pi * (hour - 7) / 12) if 7 < hour < 19 else 0.0
        return wave + (200 if 15 <= hour < 15.05 else 0)

    def run(self) -> Day:
        """24 hours."""
        best: float | None = None
        rate_in = rate_out = 0.0
        for second in range(0, 86_400, STEP):
            self.workers += sum(number for at, number in self.coming if at == second)
            each = 20.0 if second < 43_200 else 8.0
            arrived = self.rate_in(second) * STEP
            done = min(self.backlog + arrived, self.workers * each * STEP)
            self.backlog += arrived - done
            rate_in, rate_out = arrived / STEP, done / STEP
            wait = self.backlog / rate_out if rate_out else (STEP if self.backlog else 0)
            load = GroupLoad(
                round(self.backlog), 0, timedelta(seconds=wait), rate_in, rate_out, self.workers, partitions=16
            )
            found: ScaleAnswer = decide(load, Goal(least=self.least), best)
            best = found.best
            self.obey(second, found.workers)
            self.counts.append(self.workers)
            self.waits.append(wait)
        return self

    def obey(self, second: int, wanted: int) -> None:
        """As an autoscaler with a stabilization window of five minutes for fewer."""
        self.answers.append(wanted)
        underway = sum(number for at, number in self.coming if at > second)
        if wanted > self.workers + underway:
            self.coming.append((second + START, wanted - self.workers - underway))
        steady = max(self.answers[-300 // STEP :])
        if steady < self.workers:
            self.workers = steady


def test_simulated_day_is_served_with_few_workers_and_none_at_night() -> None:
    """Nothing waits for long, also when handlers become slower and in a burst; at night there is no worker."""
    day = Day().run()
    at = {hour: day.counts[hour * 3600 // STEP] for hour in range(24)}
    assert at[3] == at[5] == at[22] == 0
    assert 2 <= at[10] <= 6
    assert 6 <= at[14] <= 14, "8 a second each after noon"
    assert max(day.counts) <= 16
    assert day.backlog == 0
    late = sorted(day.waits)
    assert late[int(len(late) * 0.99)] <= 30, late[-20:]
    assert max(day.waits) <= 300, max(day.waits)
    changes = sum(a != b for a, b in zip(day.counts, day.counts[1:], strict=False))
    assert changes <= 40, changes
    assert sum(day.counts) * STEP / 3600 <= 80, "a fixed number for the burst would be 16 x 24 = 384 hours"


def test_simulated_day_keeps_the_least() -> None:
    """A topic with schedules needs a worker at night, too."""
    assert min(Day(least=1, workers=1).run().counts) == 1
