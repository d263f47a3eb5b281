"""What telemetry costs: CPU per message with and without, publishing and handling. `python -m bench.telemetry`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from secrets import token_hex
from time import process_time
from typing import Any, Final

import anyio
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased

from rsmq import Broker, Settings
from rsmq.embedded import server_for
from rsmq.telemetry import Endpoint, note_messages
from rsmq.telemetry.tracing import trace

PAYLOAD: Final = {"n": 1, "customer": "c-42", "items": ["a", "b", "c"], "note": "x" * 100}
PUBLISHERS: Final = 64
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
    "--metrics": measured,
    "--json": noted,
    "traces, share 0.01": traced(ALWAYS_ON, 0.01),
    "traces, sampler: 1 %": traced(TraceIdRatioBased(0.01)),
    "traces, all": traced(ALWAYS_ON),
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


async def main(count: int, rounds: int) -> None:
    """Rounds of all trials in turn; the least of each, for other work on the machine only adds."""
    async with server_for(None) as url:
        for batch in (None, 500):
            costs: dict[str, list[tuple[float, float]]] = {name: [] for name in TRIALS}
            for _ in range(rounds):
                for name, equip in TRIALS.items():
                    costs[name].append(await run(url, equip, count, batch))
            show("one message a call" if batch is None else f"batches of {batch}", costs)


def show(title: str, costs: dict[str, list[tuple[float, float]]]) -> None:
    """A table: microseconds, and how much more than without."""
    best = {name: [min(column) for column in zip(*rows, strict=True)] for name, rows in costs.items()}
    print(f"\n{title:24}{'publish':>20}{'handle':>20}")
    for name, figures in best.items():
        print(f"{name:24}" + "".join(told(figure, base) for figure, base in zip(figures, best["off"], strict=True)))


def told(figure: float, base: float) -> str:
    """One cell."""
    return f"{figure:9.2f} us {(figure / base - 1) * 100:+6.1f} %"


if __name__ == "__main__":
    arguments: Sequence[str] = sys.argv[1:]
    anyio.run(main, *((6_400, 2) if "--quick" in arguments else (32_000, 5)))
