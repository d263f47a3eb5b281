"""One member as a worker would hold it, for the tests of this directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread

from rsmq.connect import Client, Connector
from rsmq.heartbeat.beat import Beat
from rsmq.heartbeat.lease import Lease, Leases
from rsmq.heartbeat.membership import Membership
from rsmq.keys import Keys
from rsmq.settings import Settings

TOPIC, GROUP = "orders", "billing"


class Member:
    """A beat, a view of the others, and leases."""

    def __init__(self, name: str, client: Client, connector: Connector, settings: Settings) -> None:
        self.name, self.keys = name, Keys(settings.prefix)
        self.beat = Beat(connector, settings, self.keys, name)
        self.membership = Membership(client, self.keys, settings, name, TOPIC, GROUP)
        self.leases = Leases(client, self.keys, settings, name)
        self.lost: list[Lease] = []

    async def take(self, absent: frozenset[str] = frozenset()) -> Lease | None:
        """Take the lease of partition 0 and have it renewed."""
        lease = await self.leases.take(TOPIC, 0, GROUP, reader="", absent=absent)
        if lease is not None:
            self.beat.watch(lease, self.lost.append)
        return lease

    async def vanish(self) -> None:
        """End both threads without goodbye: the sockets close, as those of a killed process."""
        await anyio.to_thread.run_sync(self.beat.stop)


@asynccontextmanager
async def member(name: str, client: Client, connector: Connector, settings: Settings) -> AsyncIterator[Member]:
    """A member that has joined and watches."""
    one = Member(name, client, connector, settings)
    one.beat.start(asyncio.get_running_loop())
    try:
        async with anyio.create_task_group() as tasks:
            await one.beat.join(TOPIC, GROUP, {"handler": "h"}, one.membership.notice)
            await tasks.start(one.membership.run)
            yield one
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await one.vanish()
