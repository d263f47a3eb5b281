"""What telemetry costs: CPU per message with and without, publishing and handling.

`python -m benchmarks.telemetry [--quick] [--write]`: with --write into benchmarks/results and
docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from secrets import token_hex
from time import process_time
from typing import Any, Final

import anyio
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased

from benchmarks.section import Section
from rsmq import Broker, Settings
from rsmq.model.layout import single
from rsmq.redis.embedded.server import server_for
from rsmq.telemetry import Endpoint, note_messages
from rsmq.telemetry.tracing import trace

PAYLOAD: Final = {"n": 1, "customer": "c-42", "items": ["a", "b", "c"], "note": "x" * 100}
PUBLISHERS: Final = 64
BATCH: Final = 500
BLOCK: Final = 10
"""Messages that a publisher publishes before the other broker has its turn."""
BLOCKS: Final = 25
"""Pairs of such turns in a round."""
COLUMNS: Final = ("publish", "handle", "handle_batch")
Told = dict[str, Any]
Equip = Callable[[Broker], Callable[[], Any] | None]


def plain(_broker: Broker) -> None:
    """Nothing."""


def measured(broker: Broker) -> Callable[[], Any]:
    """--metrics."""
    return Endpoint(broker, "127.0.0.1:0").serving


def noted(broker: Broker) -> None:
    """--json."""
    note_messages(broker)


def traced(sampler: Sampler, share: float = 1.0) -> Equip:
    """Traces whose spans go nowhere: what is left is the cost of making them."""

    def equip(broker: Broker) -> None:
        provider = TracerProvider(sampler=ParentBased(sampler))
        provider.add_span_processor(SpanProcessor())
        trace(broker, provider, share=share)

    return equip


TRIALS: Final[dict[str, Equip]] = {
    "off": plain,
    "`--metrics`": measured,
    "`--json`": noted,
    "`trace(broker, share=0.01)`": traced(ALWAYS_ON, 0.01),
    "`trace(broker)`, the SDK samples 1 %": traced(TraceIdRatioBased(0.01)),
    "`trace(broker)`, everything is sampled": traced(ALWAYS_ON),
}


def new_broker(url: str) -> Broker:
    """With keys of its own."""
    return Broker(Settings(url=url, prefix=f"bench{token_hex(4)}", preflight="warn"))


async def handling(url: str, equip: Equip, count: int, batch: int | None = None) -> float:
    """Microseconds of this process's CPU for a handled message, without the start of the worker."""
    broker = new_broker(url)
    done, marks, seen, warm = asyncio.Event(), list[tuple[float, int]](), 0, count // 8

    def note(number: int) -> None:
        nonlocal seen
        before, seen = seen, seen + number
        if before < warm <= seen or seen == count:
            marks.append((process_time(), seen))
        if seen == count:
            done.set()

    async def one(payload: dict[str, Any]) -> None:
        note(1)

    async def many(payloads: list[dict[str, Any]]) -> None:
        note(len(payloads))

    broker.handler("orders", group="bench", batch=batch)(one if batch is None else many)
    around = equip(broker)
    async with AsyncExitStack() as stack:
        if around is not None:
            await stack.enter_async_context(around())
        await stack.enter_async_context(broker)
        await publish(broker, count // PUBLISHERS)
        gc.collect()
        async with broker.running():
            await done.wait()
        await clear(broker)
    (start, first), (end, last) = marks
    return (end - start) / (last - first) * 1e6


async def publishing(url: str, equip: Equip) -> list[tuple[float, float]]:
    """Microseconds for a publish with telemetry and without: two brokers in turn, whose neighbours are compared."""
    brokers, pairs = (new_broker(url), new_broker(url)), list[tuple[float, float]]()
    around = equip(brokers[0])
    async with AsyncExitStack() as stack:
        if around is not None:
            await stack.enter_async_context(around())
        for broker in brokers:
            await stack.enter_async_context(broker)
        gc.collect()
        for number in range(-1, BLOCKS):
            cost = dict[int, float]()
            for which in (0, 1) if number % 2 else (1, 0):
                started = process_time()
                await publish(brokers[which], BLOCK)
                cost[which] = (process_time() - started) / (PUBLISHERS * BLOCK) * 1e6
            if number >= 0:  # not the first: the topic and the connections
                pairs.append((cost[0], cost[1]))
        for broker in brokers:
            await clear(broker)
    return pairs


async def publish(broker: Broker, count: int) -> None:
    """Many publishers, each of which publishes one message after the other."""

    async def publisher() -> None:
        for _ in range(count):
            await broker.publish("orders", PAYLOAD)

    await asyncio.gather(*(publisher() for _ in range(PUBLISHERS)))


async def clear(broker: Broker) -> None:
    """Remove the messages: the server shall not grow."""
    for partition in single(broker.settings.partitions).numbers:
        await broker.client.execute_command("DEL", broker.keys.stream("orders", partition))


async def main(count: int, rounds: int) -> Told:
    """Rounds of all trials in turn, every other one backwards. Each handled message is compared with "off" in the same
    round, because the machine's other work changes slowly; each publish with that of a broker beside it."""
    names = list(TRIALS)
    pairs = {name: {what: list[tuple[float, float]]() for what in COLUMNS} for name in names}
    async with server_for(None) as url:
        for number in range(-1, rounds):
            order = names[:: 1 if number % 2 else -1]
            published = {name: await publishing(url, TRIALS[name]) for name in order}
            handled = {name: await handling(url, TRIALS[name], count) for name in order}
            batched = {name: await handling(url, TRIALS[name], count, BATCH) for name in order}
            if number >= 0:  # not the first: imports, and what the interpreter specialises
                for name in names:
                    pairs[name]["publish"] += published[name]
                    pairs[name]["handle"].append((handled[name], handled["off"]))
                    pairs[name]["handle_batch"].append((batched[name], batched["off"]))
    figures = {
        name: {
            what: {
                "microseconds": round(statistics.median(mine for mine, _ in each), 2),
                "percent": round(statistics.median(100 * (mine / base - 1) for mine, base in each), 1),
            }
            for what, each in pairs[name].items()
        }
        for name in names
    }
    return {"count": count, "rounds": rounds, "machine": machine(), "figures": figures}


def machine() -> dict[str, Any]:
    """Where it was measured; `load` is that of the last minute, at the end."""
    return {"cores": os.cpu_count(), "python": platform.python_version(), "load": round(os.getloadavg()[0], 1)}


def table(told: Told) -> str:
    """The section of the page."""
    about = told["machine"]
    rows = "\n".join(f"| {name} | {' | '.join(cells(name, each))} |" for name, each in told["figures"].items())
    text = (
        f"CPU of the Python process for one message of 170 bytes, without the start of the worker: medians of "
        f"{told['rounds']} rounds of {told['count']} messages. In brackets: the median of what it adds to a handled "
        f'message of "off" in the same round, and to a publish of a broker without telemetry, in turns of '
        f"{PUBLISHERS * BLOCK} messages. Python {about['python']}, {about['cores']} cores, load {about['load']}."
    )
    return f"""{text}

| | publish | handle | handle in batches of {BATCH} |
|---|---|---|---|
{rows}

`python -m benchmarks.telemetry --write` ({SECTION.link}).
"""


def cells(name: str, figures: dict[str, dict[str, float]]) -> list[str]:
    """A row: microseconds, and how much more than without."""
    return [
        f"{each['microseconds']:.1f} µs" + (f" ({each['percent']:+.0f} %)" if name != "off" else "")
        for each in figures.values()
    ]


SECTION: Final = Section("telemetry", table)


if __name__ == "__main__":
    arguments: Sequence[str] = sys.argv[1:]
    told = anyio.run(main, *((6_400, 2) if "--quick" in arguments else (16_000, 25)))
    print(table(told))
    if "--write" in arguments:
        SECTION.keep(told)
