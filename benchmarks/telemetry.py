"""What telemetry costs: CPU per message with and without, publishing and handling.

`python -m benchmarks.telemetry [--quick] [--write]`: with --write into docs/telemetry.json and the table of
docs/telemetry.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
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
    """Microseconds of this process's CPU for a publish and for a handled message."""
    broker = Broker(Settings(url=url, prefix=f"bench{token_hex(4)}", preflight="warn"))
    done, seen = asyncio.Event(), 0

    async def one(payload: dict[str, Any]) -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            done.set()

    async def many(payloads: list[dict[str, Any]]) -> None:
        nonlocal seen
        seen += len(payloads)
        if seen == count:
            done.set()

    broker.handler("orders", group="bench", batch=batch)(one if batch is None else many)
    around = equip(broker)
    async with AsyncExitStack() as stack:
        if around is not None:
            await stack.enter_async_context(around())
        await stack.enter_async_context(broker)
        started = process_time()
        await asyncio.gather(*(publish(broker, count // PUBLISHERS) for _ in range(PUBLISHERS)))
        published = process_time() - started
        started = process_time()
        async with broker.running():
            await done.wait()
            handled = process_time() - started
        for partition in range(broker.settings.partitions):
            await broker.client.execute_command("DEL", broker.keys.stream("orders", partition))
    return published / count * 1e6, handled / count * 1e6


async def publish(broker: Broker, count: int) -> None:
    """One after the other."""
    for _ in range(count):
        await broker.publish("orders", PAYLOAD)


async def main(count: int, rounds: int) -> Told:
    """Rounds of all trials in turn; the least of each, for other work on the machine only adds."""
    least: dict[str, dict[str, float]] = {name: {} for name in TRIALS}
    async with server_for(None) as url:
        for batch in (None, BATCH):
            costs: dict[str, list[tuple[float, float]]] = {name: [] for name in TRIALS}
            for _ in range(rounds):
                for name, equip in TRIALS.items():
                    costs[name].append(await run(url, equip, count, batch))
            for name, rows in costs.items():
                publishing, handling = (min(column) for column in zip(*rows, strict=True))
                least[name]["publish"] = min(publishing, least[name].get("publish", publishing))
                least[name]["handle" if batch is None else "handle_batch"] = handling
    figures = {name: {what: round(figure, 2) for what, figure in each.items()} for name, each in least.items()}
    return {"count": count, "rounds": rounds, "machine": machine(), "microseconds": figures}


def machine() -> dict[str, Any]:
    """Where it was measured; `load` is that of the last minute, at the end."""
    return {"cores": os.cpu_count(), "python": platform.python_version(), "load": round(os.getloadavg()[0], 1)}


def table(told: Told) -> str:
    """The part of docs/telemetry.md that a run writes."""
    figures, about = told["microseconds"], told["machine"]
    rows = "\n".join(f"| {name} | {' | '.join(cells(each, figures['off']))} |" for name, each in figures.items())
    text = (
        f"CPU of the Python process for one message of 170 bytes: the least of {told['rounds']} rounds "
        f"of {told['count']} messages, Python {about['python']}, {about['cores']} cores, load {about['load']}."
    )
    return f"""{BEGIN}
{fill(text, 120)}

| | publish | handle | handle in batches of {BATCH} |
|---|---|---|---|
{rows}
{END}"""


def cells(figures: dict[str, float], base: dict[str, float]) -> list[str]:
    """A row: microseconds, and how much more than without."""
    return [
        f"{figures[what]:.1f} µs" + (f" ({(figures[what] / base[what] - 1) * 100:+.0f} %)" if figures != base else "")
        for what in ("publish", "handle", "handle_batch")
    ]


def write(told: Told, docs: Path) -> None:
    """docs/telemetry.json, and its table in docs/telemetry.md."""
    (docs / "telemetry.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    page = docs / "telemetry.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + table(told) + rest.partition(END)[2])


if __name__ == "__main__":
    arguments: Sequence[str] = sys.argv[1:]
    size = (6_400, 2) if "--quick" in arguments else (128_000, 3)  # many: a worker starts within it, which takes 30 ms
    told = anyio.run(main, *size)
    print(table(told))
    if "--write" in arguments:
        write(told, Path(__file__).parents[1] / "docs")
