"""One member with the roles that a worker gives it, for the tests of this directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import anyio.to_thread

from rsmq.heartbeat.heartbeat import Heartbeat
from rsmq.heartbeat.lease import Lease, Leases
from rsmq.heartbeat.membership import Membership
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.scripts import Ask

TOPIC, GROUP = "orders", "billing"


class Member:
    """A heartbeat, a view of the group, and leases."""

    def __init__(
        self, name: str, client: Client, connector: Connector, settings: Settings, ask: Ask | None = None
    ) -> None:
        self.name, self.keys = name, Keys(settings.prefix)
        self.heartbeat = Heartbeat(connector, settings, self.keys, name)
        self.membership = Membership(client, self.keys, settings, name, TOPIC, GROUP, ask)
        self.leases = Leases(client, self.keys, settings, name)
        self.lost: list[Lease] = []
        self._looking = anyio.CancelScope()

    async def take(self, absent: frozenset[str] = frozenset()) -> Lease | None:
        """Take the lease of partition 0 and have it renewed."""
        lease = await self.leases.take(TOPIC, 0, GROUP, reader="", absent=absent)
        if lease is not None:
            self.heartbeat.renew(lease, self.lost.append)
        return lease

    async def look(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Watch the group until it vanishes."""
        with self._looking:
            await self.membership.run(task_status=task_status)

    async def vanish(self) -> None:
        """End the view and both threads without withdrawing: like a killed process, it looks at nothing and says
        nothing more, and its sockets close."""
        self._looking.cancel()
        await anyio.to_thread.run_sync(self.heartbeat.stop)


@asynccontextmanager
async def member(
    name: str,
    client: Client,
    connector: Connector,
    settings: Settings,
    *,
    ask: Ask | None = None,
    sees: bool = True,
) -> AsyncIterator[Member]:
    """A member that has joined and watches the group. Without `sees` it only lives: it looks at nothing."""
    one = Member(name, client, connector, settings, ask)
    one.heartbeat.start(asyncio.get_running_loop())
    try:
        async with anyio.create_task_group() as tasks:
            view = one.membership
            await one.heartbeat.join(TOPIC, GROUP, {"handler": "h"}, view.refresh, on_news=view.hear)
            if sees:
                await tasks.start(one.look)
            yield one
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await one.vanish()
