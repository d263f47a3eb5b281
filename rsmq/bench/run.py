"""A run: every trial a few times in turn, so that a busy moment of the machine hits all alike; then latency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rsmq.bench import bare, latency
from rsmq.bench.latency import RATE, Latency
from rsmq.bench.load import Load
from rsmq.bench.meter import Cost, best
from rsmq.bench.scratch import scratch
from rsmq.bench.trial import BY_NAME, TRIALS
from rsmq.connect import Client

FILLER = "many"
"""The trial whose messages the consuming ones read."""
PUBLISHING = ("pipeline", "many", "concurrent")


async def run(
    client: Client,
    load: Load,
    *,
    rounds: int,
    names: Sequence[str] = tuple(BY_NAME),
    step: Callable[[str], None] = lambda meaning: None,
) -> dict[str, list[Cost]]:
    """The costs of some trials, a list of one a round for each. Leaves nothing on the server."""
    taken: dict[str, list[Cost]] = {name: [] for name in names}
    async with scratch(client) as prefix:
        ours, is_filled = replace(load, prefix=prefix), False
        for _ in range(rounds):
            for trial in TRIALS:
                if trial.name not in names and (trial.name != FILLER or is_filled):
                    continue
                step(trial.meaning)
                if trial.name == FILLER and not is_filled:
                    cost, is_filled = await trial.measure(ours, client), True
                elif trial.name in PUBLISHING:
                    async with scratch(client) as elsewhere:
                        cost = await trial.measure(replace(load, prefix=elsewhere), client)
                else:
                    cost = await trial.measure(ours, client)
                if trial.name in taken:
                    taken[trial.name].append(cost)
    return taken


def summary(taken: dict[str, list[Cost]]) -> dict[str, Cost]:
    """The best of the rounds."""
    return {name: best(costs) for name, costs in taken.items()}


def ratio(costs: dict[str, Cost], name: str) -> float | None:
    """Client CPU against the trial's base; None for a base itself."""
    base = BY_NAME[name].base
    return None if base is None else costs[name].client_us / max(0.01, costs[base].client_us)


async def latencies(client: Client, load: Load, *, seconds: float, rounds: int = 5) -> dict[str, Latency]:
    """At a low rate, by hand and through this queue: in turn, both running all the time; the medians of the rounds."""
    count = max(10, int(seconds * RATE / rounds))
    async with scratch(client) as prefix:
        ours = replace(load, prefix=prefix)
        async with bare.latency(ours) as by_hand, latency.ours(ours) as by_queue:
            sides, taken = {"bare": by_hand, "rsmq": by_queue}, list[dict[str, Latency]]()
            for number in range(rounds + 1):
                order = list(sides) if number % 2 else list(sides)[::-1]
                taken.append({name: await sides[name](count) for name in order})
    warm = taken[1:]
    return {name: latency.middle([each[name] for each in warm]) for name in sides}
