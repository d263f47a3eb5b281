"""Runs the trials in turn, several rounds, so that a busy moment of the machine affects all alike; then latency."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from secrets import token_hex
from typing import Final

import anyio

from rsmq.cli.bench import bare, latency, work
from rsmq.cli.bench.latency import RATE, Latency
from rsmq.cli.bench.load import BenchItem, BenchLoad
from rsmq.cli.bench.meter import BY_HAND, OURS, Cost, Meter, best
from rsmq.redis.client.connector import Client
from rsmq.testing.server import remove_prefix

CLEANING_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement. `base` names the trial that it is compared with; trials that publish come first.

    `layout`: the fields of the messages that it reads.
    """

    name: str
    meaning: str
    base: str | None
    run: Callable[[BenchLoad, Meter], Awaitable[Cost]]
    layout: str = "own"

    async def measure(self, load: BenchLoad, client: Client) -> Cost:
        """Run it; `client` reads the server's own figures."""
        return await self.run(replace(load, layout=self.layout), Meter(client, BY_HAND if self.base is None else OURS))


SINGLE: Final = partial(work.consume, kind=work.single)
TRIALS: Final = (
    Trial("pipeline", "publish: redis-py pipeline of 100", None, bare.publish),
    Trial("many", "publish: publish_many", "pipeline", work.publish_many),
    Trial("concurrent", "publish: many at once, one await each", "pipeline", work.publish_concurrently),
    Trial("keys", "send: the same keys by hand, in pipelines", None, bare.write_letters),
    Trial("send", "send: each letter to a device of its own", "keys", work.send_to_devices),
    Trial("bare", "consume: bare redis-py loop", None, bare.consume),
    Trial("single", "consume: async handler, dict", "bare", SINGLE),
    Trial(
        "typed", "consume: async handler, pydantic model", "bare",
        partial(work.consume, kind=partial(work.single, payload_type=BenchItem)),
    ),
    Trial("bare-key", "consume: bare loop, plain XADD with a key", None, bare.consume, "key"),
    Trial("single-key", "consume: messages of a plain XADD with a key", "bare-key", SINGLE, "key"),
    Trial("bare-data", "consume: bare loop, plain XADD", None, bare.consume, "data"),
    Trial("single-data", "consume: messages of a plain XADD", "bare-data", SINGLE, "data"),
    Trial("limited", "consume: with a rate by key", "bare", partial(work.consume, kind=work.single, **work.BY_KEY)),
    Trial("batch", "consume: batch handler", "bare", partial(work.consume, kind=work.batches)),
    Trial("bare-suspending", "consume: bare loop, handlers suspend", None, partial(bare.consume, suspends=True)),
    Trial(
        "suspending", "consume: handlers suspend", "bare-suspending", partial(work.consume, kind=work.suspending)
    ),
)  # fmt: skip
BY_NAME: Final = {trial.name: trial for trial in TRIALS}
FILLER: Final = "many"
"""The trial that publishes the messages which the consuming trials read."""
PUBLISHING: Final = ("pipeline", "many", "concurrent", "keys", "send")


@asynccontextmanager
async def scratch(client: Client) -> AsyncIterator[str]:
    """A random key prefix. After the block, also after Ctrl-C, all its keys are deleted."""
    prefix = f"bench-{token_hex(4)}"
    try:
        yield prefix
    finally:
        with anyio.move_on_after(CLEANING_SECONDS, shield=True):
            await remove_prefix(client, prefix)


async def run(
    client: Client,
    load: BenchLoad,
    *,
    rounds: int,
    names: Sequence[str] = tuple(BY_NAME),
    step: Callable[[str], None] = lambda meaning: None,
) -> dict[str, list[Cost]]:
    """The costs of some trials, one per round. Leaves no key on the server."""
    taken: dict[str, list[Cost]] = {name: [] for name in names}
    async with scratch(client) as prefix:
        ours, is_filled, others = replace(load, prefix=prefix), False, set[str]()
        for _ in range(rounds):
            for trial in TRIALS:
                if trial.name not in names and (trial.name != FILLER or is_filled):
                    continue
                step(trial.meaning)
                if trial.layout not in ("own", *others):
                    others.add(trial.layout)
                    await bare.fill(replace(ours, layout=trial.layout))
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
    """Client CPU compared with the trial's base; None for a base itself."""
    base = BY_NAME[name].base
    return None if base is None else costs[name].client_us / max(0.01, costs[base].client_us)


async def latencies(client: Client, load: BenchLoad, *, seconds: float, rounds: int = 5) -> dict[str, Latency]:
    """At a low rate, with bare redis-py and with rsmq, measured in turn: the medians of the rounds."""
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
