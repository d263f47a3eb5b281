"""How long a user waits for `POST /notify`: with the failover chain in the request, and with the queue in between.

    python examples/notifications/measure.py [requests]

Both run in one web server on one machine, 10 requests at a time; the queue's worker is in the same process and sends
while the requests are measured. Ends when everything accepted has been sent.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import quantiles

import httpx
import uvicorn
from channels import CHAIN, NobodyReachable, Notification
from fastapi import FastAPI, HTTPException
from rich.console import Console
from rich.table import Table
from service import app, broker

CLIENTS = 10
sent = asyncio.Semaphore(0)


@app.post("/notify-in-request")
async def notify_in_request(notification: Notification) -> None:
    """What `/notify` would be without a queue: the user waits, and sees it fail."""
    try:
        await CHAIN.send(notification)
    except NobodyReachable as error:
        raise HTTPException(503) from error


@broker.middleware
async def count_sent(message: object, call_next: Callable[[object], Awaitable[None]]) -> None:
    """Let the measurement know of everything that has been sent."""
    await call_next(message)
    sent.release()


@dataclass(frozen=True)
class Result:
    """The answers to one series of requests."""

    milliseconds: list[float]
    failed: int

    def percentile(self, percent: int) -> float:
        """The time within which so many of a hundred requests were answered."""
        return quantiles(self.milliseconds, n=100, method="inclusive")[percent - 1]


async def measure(client: httpx.AsyncClient, path: str, requests: int) -> Result:
    """Post that many notifications, ten at a time."""
    answers: list[tuple[float, bool]] = []
    numbers = iter(range(requests))

    async def post_in_turn() -> None:
        for number in numbers:
            started = time.perf_counter()
            answer = await client.post(path, json={"user": f"user-{number}", "text": "hello"})
            answers.append(((time.perf_counter() - started) * 1000, answer.is_error))

    await asyncio.gather(*(post_in_turn() for _ in range(CLIENTS)))
    return Result([elapsed for elapsed, _ in answers], sum(failed for _, failed in answers))


@asynccontextmanager
async def served(service: FastAPI):
    """The service behind a real socket, and a client for it."""
    server = uvicorn.Server(uvicorn.Config(service, port=0, log_level=logging.WARNING))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        if serving.done():
            serving.result()
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        yield client
    server.should_exit = True
    await serving


def table_of(direct: Result, queued: Result) -> Table:
    """Both results and how many times faster the queue answers."""
    table = Table("", "in the request", "queued", "ratio")
    for percent in (50, 99):
        slow, fast = direct.percentile(percent), queued.percentile(percent)
        table.add_row(f"p{percent}", f"{slow:.1f} ms", f"{fast:.1f} ms", f"{slow / fast:.1f}x")
    table.add_row("failed", str(direct.failed), str(queued.failed), "")
    return table


async def main(requests: int) -> None:
    async with served(app) as client:
        direct = await measure(client, "/notify-in-request", requests)
        queued = await measure(client, "/notify", requests)
        for _ in range(requests - queued.failed):
            await sent.acquire()
    Console().print(table_of(direct, queued))
    print(f"{requests} requests each; all {requests - queued.failed} that the queue accepted have been sent")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 300))
