"""A partition changes hands while the line to the server breaks."""

from __future__ import annotations

from datetime import timedelta

import pytest

from rsmq import Broker, BrokerUnavailable, Settings
from rsmq.heartbeat.lease import Lease, Leases
from tests.contract.witness import lanes
from tests.patience import until


async def test_a_lease_is_given_back_though_the_line_breaks(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane is dropped by then: kept on the server, the lease would hold up its partition until it runs out."""
    failed: list[Lease] = []
    release = Leases.release

    async def broken(self: Leases, lease: Lease) -> None:
        if failed.count(lease) < 2:
            failed.append(lease)
            raise BrokerUnavailable("the line breaks")
        await release(self, lease)

    monkeypatch.setattr(Leases, "release", broken)

    def member() -> Broker:
        broker = Broker(settings.model_copy(update={"lease_ttl": timedelta(minutes=2), "preflight": "warn"}))

        @broker.handler("t", group="g")
        async def handle(_order: dict[str, int]) -> None:
            """Never called: nothing is published."""

        return broker

    first, second = member(), member()
    async with first.running():
        await until(lambda: len(lanes(first)) == 8, "the first has all")
        async with second.running():
            await until(lambda: len(lanes(first)) == len(lanes(second)) == 4, "each has half", 20)
            assert len(failed) >= 8
            monkeypatch.undo()
