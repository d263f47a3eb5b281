"""A worker starts through a proxy that loses replies: the commands of the start can be repeated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rsmq import Broker, Settings
from tests.contract.witness import Witness
from tests.matrix import network
from tests.matrix.network import FaultyProxy
from tests.servers import Server


@pytest.fixture
def own() -> Iterator[Server]:
    """A server that a proxy can reach."""
    with Server(tcp=True) as running:
        yield running


async def test_worker_starts_although_replies_are_lost(
    own: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reply in twenty is lost with its connection; the worker starts and handles a message."""
    monkeypatch.setattr(network, "LOST", 0.05)
    async with FaultyProxy(own.port, "lost-replies") as proxy:
        for start in range(5):
            broker, witness = Broker(Settings(url=proxy.url, prefix=f"{prefix}{start}", preflight="warn")), Witness()

            @broker.handler("t", group="g")
            async def handle(order: dict[str, int], witness: Witness = witness) -> None:
                witness.note(order["n"])

            async with broker.running():
                await broker.publish("t", {"n": start})
                await witness.sees([start], again=True)
