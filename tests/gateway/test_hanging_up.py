"""How a gateway ends connections."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from rsmq.gateway.connections.client_link import hang_up

pytestmark = pytest.mark.anyio


class Client(asyncio.Protocol):
    """What the gateway has of a connection."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()

    def connection_lost(self, _: Exception | None) -> None:
        """It has ended."""
        self.lost.set()


@pytest.mark.parametrize("lingers", [True, False])
async def test_client_that_has_just_reset_its_connection(lingers: bool) -> None:
    """The event loop has not seen it yet. The connection ends as any other."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        peer = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
    transport, client = await asyncio.get_running_loop().connect_accepted_socket(Client, accepted)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    hang_up(transport, lingers=lingers)
    await asyncio.wait_for(client.lost.wait(), 30)
