"""How many workers a group needs now. Pure: the exporter asks it for autoscalers, a test lets it run for a day."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from rsmq.inspector.trend import GroupTrend, TopicTrend

FORGET: Final = 0.05
"""How fast a worker's best rate is forgotten, for each busy look: handlers become slower, too."""
SOON: Final = timedelta(seconds=1)
"""A message that waits for longer than this waits for a worker."""
MOST: Final = 10**9
HEADROOM: Final = 0.8
"""Of its best rate a worker shall be busy with what comes in; the rest is for bursts."""


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """The work of a group. Rates are messages a second, None where they are not known yet.

    `delayed` counts messages that are not due: only a worker of the topic can make them due.
    """

    waiting: int
    delayed: int
    oldest: timedelta
    rate_in: float | None
    rate_out: float | None
    workers: int
    partitions: int
    is_paused: bool = False
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Goal:
    """The target of the operator: a backlog is gone within `drain`. `least` and `most` are numbers of workers."""

    drain: timedelta = timedelta(seconds=60)
    least: int = 0
    most: int | None = None


@dataclass(frozen=True, slots=True)
class ScaleAnswer:
    """The answer. `best` is the most that one worker has settled in a second, for the next question."""

    workers: int
    best: float | None
    why: str


def load_of(topic: TopicTrend | None, group: GroupTrend) -> GroupLoad:
    """The load of a group of a board."""
    return GroupLoad(
        waiting=group.known_backlog,
        delayed=0 if topic is None else topic.delayed,
        oldest=group.oldest or timedelta(0),
        rate_in=None if topic is None else topic.rate_in,
        rate_out=group.rate_out,
        workers=sum(member.heard_ago is not None for member in group.members),
        partitions=group.most_owners,
        is_paused=group.is_paused,
        is_shared=group.distribution == "shared",
    )


def decide(load: GroupLoad, goal: Goal, best: float | None) -> ScaleAnswer:
    """The number of workers for a load. With nothing to do it is `least`, zero by default."""
    best = learned(load, best)
    if load.is_paused:
        return ScaleAnswer(bounded(load.workers, load, goal), best, "paused: as many as there are")
    something = bool(load.waiting or load.delayed)
    if load.rate_in is None:
        return ScaleAnswer(bounded(max(load.workers, something), load, goal), best, "rates are not known yet")
    if not (something or load.rate_in):
        return ScaleAnswer(bounded(0, load, goal), best, "nothing to do")
    if not best:  # no worker was busy yet: one more while messages wait, one less while none does
        step = 1 if load.oldest > SOON else -1
        return ScaleAnswer(
            bounded(max(1, load.workers + step), load, goal), best, "the rate of a worker is not known yet"
        )
    arriving = load.rate_in / (best * HEADROOM)
    draining = load.waiting / best / goal.drain.total_seconds()
    wanted = math.ceil(min(arriving + draining, MOST) - 1e-9)  # a tiny rate would make it infinite
    why = f"{best:.3g} a second each, {load.rate_in:.3g} a second come in, {load.waiting} wait"
    if load.oldest > goal.drain and wanted <= load.workers:  # what a worker can do has become less
        wanted, why = load.workers + 1, f"{why}, the oldest for {load.oldest.total_seconds():.0f} s"
    return ScaleAnswer(bounded(max(wanted, 1), load, goal), best, why)


def learned(load: GroupLoad, best: float | None) -> float | None:
    """The messages a second of one worker at its best. It is seen only while there is more to do than is done."""
    if not load.workers or not load.rate_out:
        return best
    seen = load.rate_out / load.workers
    is_busy = load.oldest > SOON
    if best is None or seen > best:
        return seen if best is not None or is_busy else best
    return best + FORGET * (seen - best) if is_busy else best


def bounded(workers: int, load: GroupLoad, goal: Goal) -> int:
    """Between the goal's bounds, and not more than partitions: another worker would own none."""
    most = goal.most if load.is_shared else min(load.partitions, goal.most or load.partitions)
    return max(goal.least, workers if most is None else min(workers, most))
