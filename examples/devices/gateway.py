"""A gateway: holds the connections of many phones, which connect and disconnect at random.

    python gateway.py --help

A real gateway would forward letters and acknowledgements over MQTT or web sockets. Here it writes them into a ledger.
"""

import logging
import math
import os
import sys
from pathlib import Path
from random import Random
from typing import Annotated

import anyio
import typer
from ledger import AGAIN, CONNECTED, FILE, LEFT, NEW, Entry
from passenger import phone as name_of

from rsmq import Broker, Session
from rsmq.testing.ledger import LedgerWriter


class Phone:
    """Online and offline in turn, each for a random time. After `stay_online` it stays online."""

    def __init__(self, broker: Broker, ledger: LedgerWriter, name: str, mean_seconds: float) -> None:
        self.name = name
        self._broker, self._ledger, self._mean_seconds = broker, ledger, mean_seconds
        self._random = Random(f"{name} {os.getpid()}")
        self._stays_online = anyio.Event()
        self._visit = anyio.CancelScope()

    async def run(self) -> None:
        """Connect and disconnect until cancelled."""
        if self._random.random() < 0.5:
            await self._be_away()
        while True:
            async with self._broker.connect(self.name) as session:
                self._ledger.write(Entry.now(CONNECTED, self.name))
                self._visit = anyio.CancelScope(deadline=self._until())
                with self._visit:
                    await self._receive(session)
            self._ledger.write(Entry.now(LEFT, self.name))
            await self._be_away()

    def stay_online(self) -> None:
        """Connect, and stay connected."""
        self._stays_online.set()
        self._visit.deadline = math.inf

    async def _receive(self, session: Session) -> None:
        async for letter in session:
            event = AGAIN if letter.is_redelivered else NEW
            published_ms = letter.timestamp.timestamp() * 1000
            self._ledger.write(Entry.now(event, self.name, letter.seq, letter.payload["number"], published_ms))
            await session.ack(letter)

    async def _be_away(self) -> None:
        with anyio.CancelScope(deadline=self._until()):
            await self._stays_online.wait()

    def _until(self) -> float:
        """When it connects or disconnects next."""
        if self._stays_online.is_set():
            return math.inf
        return anyio.current_time() + self._random.expovariate(1 / self._mean_seconds)


async def serve(names: list[str], mean_seconds: float, folder: Path) -> None:
    """Serve phones until stdin ends; after its first line they all stay online."""
    ledger, orders = LedgerWriter(folder / FILE), anyio.wrap_file(sys.stdin)
    async with Broker() as broker, anyio.create_task_group() as tasks:
        phones = [Phone(broker, ledger, name, mean_seconds) for name in names]
        for phone in phones:
            tasks.start_soon(phone.run)
        await orders.readline()
        for phone in phones:
            phone.stay_online()
        await orders.readline()
        tasks.cancel_scope.cancel()


def main(
    first: Annotated[int, typer.Option(help="The first phone of this gateway ...")],
    last: Annotated[int, typer.Option(help="... and the one after its last.")],
    mean_seconds: Annotated[float, typer.Option(help="Seconds that a phone is online, and offline, on average.")],
    folder: Annotated[Path, typer.Option(help="The folder of the ledger.")],
) -> None:
    """Hold the connections of phones until stdin ends; a first line makes all stay online. See show.py."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    anyio.run(serve, [name_of(number) for number in range(first, last)], mean_seconds, folder)


if __name__ == "__main__":
    typer.run(main)
