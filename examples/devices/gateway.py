"""A gateway: holds the connections of many phones, which come and go at random.

    python gateway.py --help

In real life a phone's connection is MQTT or a web socket: the gateway passes letters on and acknowledgements back. Here
the phone is a line in a ledger.
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
from ledger import AGAIN, CONNECTED, LEFT, NEW, Ledger
from passenger import phone as name_of

from rsmq import Broker, Session


class Phone:
    """Online for a while, offline for a while, both of random length, until it is called home: then it stays."""

    def __init__(self, broker: Broker, ledger: Ledger, name: str, spell: float) -> None:
        self.name = name
        self._broker, self._ledger, self._spell = broker, ledger, spell
        self._chance = Random(f"{name} {os.getpid()}")
        self._home = anyio.Event()
        self._stay = anyio.CancelScope()

    async def live(self) -> None:
        """Until cancelled."""
        if self._chance.random() < 0.5:
            await self._be_away()
        while True:
            async with self._broker.connect(self.name) as session:
                self._ledger.write(CONNECTED, self.name)
                self._stay = anyio.CancelScope(deadline=self._until())
                with self._stay:
                    await self._receive(session)
            self._ledger.write(LEFT, self.name)
            await self._be_away()

    def call_home(self) -> None:
        """From now on it is online."""
        self._home.set()
        self._stay.deadline = math.inf

    async def _receive(self, session: Session) -> None:
        async for letter in session:
            event = AGAIN if letter.is_redelivered else NEW
            published_ms = letter.timestamp.timestamp() * 1000
            self._ledger.write(event, self.name, letter.seq, letter.payload["number"], published_ms)
            await session.ack(letter)

    async def _be_away(self) -> None:
        with anyio.CancelScope(deadline=self._until()):
            await self._home.wait()

    def _until(self) -> float:
        """When it comes or goes."""
        if self._home.is_set():
            return math.inf
        return anyio.current_time() + self._chance.expovariate(1 / self._spell)


async def serve(names: list[str], spell: float, folder: Path) -> None:
    """Serve phones until stdin ends; its first line calls them home."""
    ledger, orders = Ledger(folder), anyio.wrap_file(sys.stdin)
    async with Broker() as broker, anyio.create_task_group() as tasks:
        phones = [Phone(broker, ledger, name, spell) for name in names]
        for phone in phones:
            tasks.start_soon(phone.live)
        await orders.readline()
        for phone in phones:
            phone.call_home()
        await orders.readline()
        tasks.cancel_scope.cancel()


def main(
    first: Annotated[int, typer.Option(help="The first phone of this gateway ...")],
    last: Annotated[int, typer.Option(help="... and the one after its last.")],
    spell: Annotated[float, typer.Option(help="How long a phone is online, and offline, on average, in seconds.")],
    ledger: Annotated[Path, typer.Option(help="The folder of the ledgers.")],
) -> None:
    """Hold the connections of phones; a line on stdin calls them home, its end ends. Set RSMQ_URL and RSMQ_PREFIX."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    anyio.run(serve, [name_of(number) for number in range(first, last)], spell, ledger)


if __name__ == "__main__":
    typer.run(main)
