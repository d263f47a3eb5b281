"""A worker that is told to stop before it has really begun."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rsmq import Broker, Settings
from rsmq.heartbeat.beat import Beat
from rsmq.testing import ThrowawayServer


async def test_a_stop_while_the_server_goes_away_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server dies between its first question and its joining the group: one stop ends it, nobody waits for ever."""
    joining, join = anyio.Event(), Beat.join
    with ThrowawayServer(tcp=True) as server:

        async def join_nobody(beat: Beat, *about: Any) -> None:
            server.kill()
            joining.set()
            await join(beat, *about)

        monkeypatch.setattr(Beat, "join", join_nobody)
        broker = Broker(Settings(url=server.url, preflight="warn"))
        broker.handler("t", group="g")(handle)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(broker.run)
                await joining.wait()
                await anyio.lowlevel.checkpoint()
                broker.stop()


async def handle(_order: dict[str, int]) -> None:
    """Never called."""
