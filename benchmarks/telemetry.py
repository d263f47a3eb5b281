"""What telemetry costs: CPU per message with and without, publishing and handling.

`python -m benchmarks.telemetry [--quick] [--write]`: with --write into docs/telemetry.json and the table of
docs/telemetry.md.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from secrets import token_hex
from textwrap import fill
from time import process_time
from typing import Any, Final

import anyio
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased

from rsmq import Broker, Settings
from rsmq.redis.embedded.server import server_for
from rsmq.telemetry import Endpoint, note_messages
from rsmq.telemetry.tracing import trace

PAYLOAD: Final = {"n": 1, "customer": "c-42", "items": ["a", "b", "c"], "note": "x" * 100}
PUBLISHERS: Final = 64
BATCH: Final = 500
COLUMNS: Final = ("publish", "handle", "handle_batch")
BEGIN: Final = "<!-- written by python -m benchmarks.telemetry --write -->"
END: Final = "<!-- until here -->"
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


async def run(url: str, equip: Equip, count: int, batch: int | None = None) -> tuple[float, float]:
    """Microseconds of this process's CPU for a publish and for a handled message, without the start of the worker."""
    broker = Broker(Settings(url=url, prefix=f"bench{token_hex(4)}", preflight="warn"))
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
        gc.collect()
        started = process_time()
        await asyncio.gather(*(publish(broker, count // PUBLISHERS) for _ in range(PUBLISHERS)))
        published = process_time() - started
        async with broker.running():
            await done.wait()
        for partition in range(broker.settings.partitions):
            await broker.client.execute_command("DEL", broker.keys.stream("orders", partition))
    (start, first), (end, last) = marks
    return published / count * 1e6, (end - start) / (last - first) * 1e6


async def publish(broker: Broker, count: int) -> None:
    """One after the other."""
    for _ in range(count):
        await broker.publish("orders", PAYLOAD)


async def main(count: int, rounds: int) -> Told:
    """Rounds of all trials in turn, every other one backwards. Each is compared with "off" in the same round, because
    the machine's other work changes slowly."""
    names = list(TRIALS)
    costs: dict[str, dict[str, list[float]]] = {name: {what: [] for what in COLUMNS} for name in names}
    async with server_for(None) as url:
        for number in range(-1, rounds):
            for batch in (None, BATCH):
                for name in names[:: 1 if number % 2 else -1]:
                    publishing, handling = await run(url, TRIALS[name], count, batch)
                    if number >= 0:  # not the first: imports, and what the interpreter specialises
                        costs[name]["publish"].append(publishing)
                        costs[name]["handle" if batch is None else "handle_batch"].append(handling)
    figures = {
        name: {
            what: {
                "microseconds": round(statistics.median(each), 2),
                "percent": round(statistics.median(100 * (a / b - 1) for a, b in zip(each, base, strict=True)), 1),
            }
            for what, each in costs[name].items()
            for base in [costs["off"][what]]
        }
        for name in names
    }
    return {"count": count, "rounds": rounds, "machine": machine(), "figures": figures}


def machine() -> dict[str, Any]:
    """Where it was measured; `load` is that of the last minute, at the end."""
    return {"cores": os.cpu_count(), "python": platform.python_version(), "load": round(os.getloadavg()[0], 1)}


def table(told: Told) -> str:
    """The part of docs/telemetry.md that a run writes."""
    about = told["machine"]
    rows = "\n".join(f"| {name} | {' | '.join(cells(name, each))} |" for name, each in told["figures"].items())
    text = (
        f"CPU of the Python process for one message of 170 bytes, without the start of the worker: medians of "
        f'{told["rounds"]} rounds of {told["count"]} messages. In brackets: the median of what it adds to "off" of '
        f"the same round. Python {about['python']}, {about['cores']} cores, load {about['load']}."
    )
    return f"""{BEGIN}
{fill(text, 120)}

| | publish | handle | handle in batches of {BATCH} |
|---|---|---|---|
{rows}
{END}"""


def cells(name: str, figures: dict[str, dict[str, float]]) -> list[str]:
    """A row: microseconds, and how much more than without."""
    return [
        f"{each['microseconds']:.1f} µs" + (f" ({each['percent']:+.0f} %)" if name != "off" else "")
        for each in figures.values()
    ]


def write(told: Told, docs: Path) -> None:
    """docs/telemetry.json, and its table in docs/telemetry.md."""
    (docs / "telemetry.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    page = docs / "telemetry.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + table(told) + rest.partition(END)[2])


if __name__ == "__main__":
    arguments: Sequence[str] = sys.argv[1:]
    told = anyio.run(main, *((6_400, 2) if "--quick" in arguments else (16_000, 25)))
    print(table(told))
    if "--write" in arguments:
        write(told, Path(__file__).parents[1] / "docs")
