"""Which of several answers counts: a failover is not over in one moment, and not everywhere at once."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from rsmq.redis.client.sentinel import MasterDiscovery, MasterState, SentinelClients
from rsmq.redis.wire.slots import Address
from tests.sentinel.sentinels import NAME, Sentinels

OLD, NEW = ("10.0.0.1", 9000), ("10.0.0.1", 1000)


def says(epoch: int, address: Address) -> dict[str, Any]:
    """What a sentinel answers."""
    return {"config-epoch": epoch, "ip": address[0], "port": address[1]}


def test_a_configuration_names_one_master() -> None:
    """One that comes back under the same number, or an older one, is not believed, nor when all but one say so."""
    moves: list[Address] = []
    master_state = MasterState(moves.append)
    assert master_state.learn([says(1, OLD)], 3, -1) == OLD
    assert master_state.learn([says(2, NEW), says(1, OLD)], 3, 1) == NEW
    assert master_state.learn([says(2, OLD)], 3, 2) == NEW
    assert master_state.learn([says(2, OLD), says(2, NEW), says(2, NEW)], 3, 2) == NEW
    assert master_state.learn([says(1, OLD), says(1, OLD)], 3, 2) == NEW
    assert moves == [NEW]


def test_sentinels_that_were_set_up_anew_are_believed() -> None:
    """All of them say the same, and were asked after the newer configuration was known."""
    master_state = MasterState(lambda _: None)
    master_state.learn([says(7, NEW)], 2, -1)
    assert master_state.learn([says(0, OLD), says(0, OLD)], 2, -1) == NEW
    assert master_state.learn([says(0, OLD), says(0, OLD)], 2, 7) == OLD


@pytest.mark.long_chaos("14 seconds")
async def test_a_failover_is_seen_once() -> None:
    """A master that is up is replaced, and asked for without a pause meanwhile: it changes once, and never back."""
    with Sentinels() as sentinels:
        clients = SentinelClients(sentinels.url, 1.0, {})
        discovery = MasterDiscovery(clients._master_state, clients._hosts, 1.0, {})
        first, seen = await discovery.discover_master(NAME), list[Address]()
        with sentinels.sentinels[0].client() as client:
            client.execute_command("SENTINEL", "FAILOVER", NAME)
        with anyio.fail_after(30):
            while not (seen and seen[-1] != first and await anyio.to_thread.run_sync(sentinels.is_whole)):
                seen.append(await discovery.discover_master(NAME))
        await discovery.aclose()
    changes = [new for old, new in zip([first, *seen], seen, strict=False) if new != old]
    assert len(changes) == 1
