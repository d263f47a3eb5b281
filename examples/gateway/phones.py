"""The phones: clients that connect again, to the other gateway, when their connection ends."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

PAUSE = 0.05
"""Seconds between two attempts to connect."""


@dataclass(frozen=True)
class Receipt:
    """A letter at its phone. `connection` counts the connections of the phone."""

    connection: int
    number: int
    is_redelivered: bool


class Phones:
    """What all phones have received, and how many times they had to connect."""

    def __init__(self, gateways: Sequence[str]) -> None:
        self.receipts: dict[str, list[Receipt]] = defaultdict(list)
        self.received: set[tuple[str, int]] = set()
        self.connections: dict[str, int] = defaultdict(int)
        self._gateways = gateways

    async def run(self, phone: str, first: int) -> None:
        """One phone, until cancelled. It begins at gateway `first`."""
        for attempt in range(first, 1_000_000):
            try:
                await self._visit(phone, self._gateways[attempt % len(self._gateways)])
            except (OSError, WebSocketException):  # refused, or ended without a word
                await anyio.sleep(PAUSE)

    async def _visit(self, phone: str, gateway: str) -> None:
        """One connection: acknowledge what comes, when it is written down."""
        async with connect(f"{gateway}/phones/{phone}", compression=None) as connection:
            self.connections[phone] += 1
            async for text in connection:
                letter = json.loads(text)
                receipt = Receipt(self.connections[phone], letter["payload"]["number"], letter["redelivered"])
                self.receipts[phone].append(receipt)
                self.received.add((phone, receipt.number))
                await connection.send(json.dumps({"ack": letter["seq"]}))
