"""A worker starts over a line that loses answers: what is asked at the start may be asked again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rsmq import Broker, Settings
from tests.contract.witness import Witness
from tests.matrix import weather
from tests.matrix.weather import Line
from tests.servers import Server


@pytest.fixture
def own() -> Iterator[Server]:
    """A server where a proxy can reach it."""
    with Server(tcp=True) as running:
        yield running


async def test_a_start_outlasts_lost_answers(own: Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer in twenty is lost, and its connection: all that a start needs comes to be."""
    monkeypatch.setattr(weather, "LOST", 0.05)
    async with Line(own.port, "lost-replies") as line:
        for start in range(5):
            broker, witness = Broker(Settings(url=line.url, prefix=f"{prefix}{start}", preflight="warn")), Witness()

            @broker.handler("t", group="g")
            async def handle(order: dict[str, int], witness: Witness = witness) -> None:
                witness.note(order["n"])

            async with broker.running():
                await broker.publish("t", {"n": start})
                await witness.sees([start], again=True)
