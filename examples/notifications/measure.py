"""How long a user waits for `POST /notify`: with the providers in the request, and with the queue in between.

    python examples/notifications/measure.py [requests]

Requests come at the same steady rate in both, over a real socket. The queue's worker runs in the web server's process
and sends while the requests are measured. In the request no receipt can be waited for: the first provider that takes it
has to do. Ends when everything that was accepted has been pushed.
"""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from statistics import quantiles

import httpx
import uvicorn
from channels import ALIMTALK, PUSH, SMS, ChannelUnavailable, NoAddress, Notification, TooManyRequests
from fastapi import FastAPI, HTTPException
from rich.console import Console
from rich.table import Table
from service import app, broker

from rsmq import Message

INTERVAL = timedelta(milliseconds=10)
pushed = asyncio.Semaphore(0)


@app.post("/notify-in-request")
async def notify_in_request(notification: Notification) -> None:
    """What `/notify` would be without a queue: the user waits, and sees it fail."""
    for channel in (PUSH, SMS, ALIMTALK):
        with suppress(ChannelUnavailable, NoAddress, TooManyRequests):
            return await channel.send(notification)
    raise HTTPException(503)


@broker.middleware
async def count_pushed(message: Message, call_next: Callable[[Message], Awaitable[None]]) -> None:
    """Let the measurement know of every notification that is pushed, or left to the SMS."""
    await call_next(message)
    if message.topic == "push":
        pushed.release()


@dataclass(frozen=True)
class Result:
    """The answers to one series of requests."""

    milliseconds: list[float]
    failed: int

    def percentile(self, percent: int) -> float:
        """The time within which so many of a hundred requests were answered."""
        return quantiles(self.milliseconds, n=100, method="inclusive")[percent - 1]


async def measure(client: httpx.AsyncClient, path: str, requests: int) -> Result:
    """Post that many notifications at the steady rate, whether the earlier ones were answered or not."""

    async def post(number: int) -> tuple[float, bool]:
        await asyncio.sleep(number * INTERVAL.total_seconds())
        started = time.perf_counter()
        answer = await client.post(path, json={"user": f"user-{number}", "text": "hello", "band": "urgent"})
        return (time.perf_counter() - started) * 1000, answer.is_error

    answers = await asyncio.gather(*(post(number) for number in range(requests)))
    return Result([elapsed for elapsed, _ in answers], sum(is_error for _, is_error in answers))


@asynccontextmanager
async def served(service: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
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


async def compare(requests: int) -> tuple[Result, Result]:
    """One series with the providers in the request, one with the queue in between."""
    async with served(app) as client:
        direct = await measure(client, "/notify-in-request", requests)
        queued = await measure(client, "/notify", requests)
        for _ in range(requests - queued.failed):
            await pushed.acquire()
    return direct, queued


def main(requests: int) -> None:
    logging.getLogger("rsmq").setLevel(logging.ERROR)  # a provider that holds is a warning
    with redirect_stdout(StringIO()):  # the providers print a line for each
        direct, queued = asyncio.run(compare(requests))
    Console().print(table_of(direct, queued))
    print(f"{requests} requests each; the {requests - queued.failed} that the queue accepted have all been pushed")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
