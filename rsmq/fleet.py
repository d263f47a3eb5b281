"""Packed commands for many keys in one exchange: one write to each node that has some of them, replies in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rsmq.connect import Client
from rsmq.errors import BrokerError, BrokerUnavailable
from rsmq.slot import Key
from rsmq.wire import Wire, pack

ASKING = pack(("ASKING",))

Packed = tuple[Key, bytes]
"""A key, which decides the node, and a packed command on keys of the same slot."""


class Fleet:
    """Raw connections to the nodes it meets (one, on a single server), for one task at a time.

    An error in a reply is returned in its place, as on a `Wire`. A node that cannot be reached answers all its
    commands with BrokerUnavailable: whether they were executed is then unknown. A slot that has moved is followed, for
    a command that was sent elsewhere was not executed; commands of one slot stay in order.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._wires: dict[Client, Wire] = {}

    async def exchange(self, commands: Sequence[Packed], timeout: float | None = None) -> list[Any]:
        """One reply a command, in order. Raises nothing but cancellation and ConfigError (refused credentials)."""

        async def send(node: Client, packed: list[bytes], *, asking: bool) -> list[Any]:
            return await self._send(node, packed, asking=asking, timeout=timeout)

        return await self._client.spread(commands, send)

    async def _send(self, node: Client, packed: list[bytes], *, asking: bool, timeout: float | None) -> list[Any]:
        """What one node says. Opened on first use, and again after a break."""
        wire = self._wires.get(node)
        if wire is None:
            wire = self._wires[node] = Wire(node)
        try:
            if not wire.is_open:
                await wire.open()
            if asking:
                pairs = [part for command in packed for part in (ASKING, command)]
                return (await wire.exchange(pairs, timeout))[1::2]
            return await wire.exchange(packed, timeout)
        except BrokerUnavailable as error:
            return [error] * len(packed)
        except BrokerError as error:  # not about a command: the connection itself was refused
            return [BrokerUnavailable(str(error))] * len(packed)

    async def close(self) -> None:
        """Drop the connections; the next exchange opens them again."""
        wires, self._wires = self._wires, {}
        for wire in wires.values():  # suspends nowhere, so it is done also when the task is being cancelled
            await wire.close()

    def __repr__(self) -> str:
        return f"<Fleet nodes={len(self._wires)}>"
