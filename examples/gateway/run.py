"""200 phones at two gateways, one of which is killed: each phone gets all its letters in order. Ends with a verdict.

python examples/gateway/run.py
python examples/gateway/run.py --phones 1000 --letters 100
"""

import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import anyio
import typer
from phones import Phones
from verdict import Verdict, judge

from rsmq import Broker, Settings

GATEWAYS = 2
POLL_SECONDS = 0.05
PATIENCE = 60.0
"""Give up after so many seconds without a letter: the verdict then says what is missing."""


def main(
    phones: Annotated[int, typer.Option(min=2, max=5_000, help="How many.")] = 200,
    letters: Annotated[int, typer.Option(min=2, max=5_000, help="How many each phone gets.")] = 50,
    url: Annotated[str | None, typer.Option(help="The server. Default: RSMQ_URL, else an embedded one.")] = None,
) -> None:
    """Send letters to phones and kill a gateway; ends with a verdict (exit code 1 if it is bad)."""
    logging.getLogger("rsmq").setLevel(logging.ERROR)
    names = [f"phone-{number:04}" for number in range(phones)]
    with tempfile.TemporaryDirectory(prefix="rsmq-gateway-") as folder:
        verdict, reconnected = anyio.run(perform, names, letters, Path(folder), url)
    print(f"{phones} phones, {reconnected} of them connected again after the kill")
    print(f"{verdict.received} letters received of {phones * letters}, {verdict.again} of them again, as redelivered")
    if verdict.wrong:
        print(f"A promise was BROKEN: {verdict.wrong}")
        sys.exit(1)
    print("Every letter received, in order per phone.")


async def perform(names: list[str], letters: int, folder: Path, url: str | None) -> tuple[Verdict, int]:
    """Run all of it; the verdict, and how many phones have connected again."""
    overrides = {} if url is None else {"url": url}
    async with Broker(Settings(**overrides, prefix=f"gateway-{secrets.token_hex(4)}")) as broker:
        with gateways(broker, folder) as (processes, addresses):
            phones = Phones(addresses)
            async with anyio.create_task_group() as tasks:
                for number, name in enumerate(names):
                    tasks.start_soon(phones.run, name, number % GATEWAYS)
                await until(lambda: len(phones.connections), len(names))
                half = letters // 2
                await send(broker, names, range(half))
                await until(lambda: len(phones.received), len(names) * half)
                processes[0].kill()
                tasks.start_soon(send, broker, names, range(half, letters))
                await until(lambda: len(phones.received), len(names) * letters)
                tasks.cancel_scope.cancel()
        left = 0  # the other gateway has ended: the last acknowledgements are with the server
        for device in [device async for device in broker.devices.iterate()]:
            left += device.backlog + device.dropped
            await broker.devices.purge(device.client_id)
    again = sum(count > 1 for count in phones.connections.values())
    return judge(names, letters, phones.receipts, left), again


async def send(broker: Broker, names: list[str], numbers: range) -> None:
    """Letters with these numbers to each phone."""
    for number in numbers:
        await broker.send_many([(name, {"number": number}) for name in names], topic="news")


async def until(count: Callable[[], int], wanted: int) -> None:
    """Wait until a count is reached, or does not change any more."""
    before, changed_at = -1, time.monotonic()
    while (now := count()) < wanted:
        if now != before:
            before, changed_at = now, time.monotonic()
        elif time.monotonic() > changed_at + PATIENCE:
            return
        await anyio.sleep(POLL_SECONDS)


@contextmanager
def gateways(broker: Broker, folder: Path) -> Iterator[tuple[list[subprocess.Popen[bytes]], list[str]]]:
    """Gateway processes and their addresses. Their logs are in the folder."""
    environment = {**os.environ, "RSMQ_URL": broker.url, "RSMQ_PREFIX": broker.settings.prefix}
    processes, addresses = list[subprocess.Popen[bytes]](), list[str]()
    try:
        for number in range(GATEWAYS):
            # phones may connect from now on, and are refused when the gateway, which alone keeps it open, has ended
            with socket.create_server(("127.0.0.1", 0)) as listener, (folder / f"{number}.log").open("wb") as log:
                command = [sys.executable, "-m", "uvicorn", "gateway:app", "--fd", str(listener.fileno())]
                process = subprocess.Popen(
                    command, cwd=Path(__file__).parent, env=environment, stdout=log, stderr=log,
                    pass_fds=[listener.fileno()],
                )  # fmt: skip
                processes.append(process)
                addresses.append(f"ws://127.0.0.1:{listener.getsockname()[1]}")
        yield processes, addresses
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


if __name__ == "__main__":
    typer.run(main)
