"""Which server may use a database under a prefix: one at a time."""

from __future__ import annotations

import logging
from typing import Final

import anyio
from sqlalchemy import Connection, select, update
from sqlalchemy.exc import IntegrityError

from rsmq.errors import OtherServer
from rsmq.model.clock import monotonic
from rsmq.redis.identity import deployment_id
from rsmq.redis.server_context import ServerContext
from rsmq.sql.database import Database
from rsmq.sql.tables import DEPLOYMENT

log = logging.getLogger("rsmq.sql")

KEEP_SECONDS: Final = 2.0
"""Between two renewals by the worker that relays, or deletes old marks."""
WATCH_SECONDS: Final = 7.0
"""So long a new server watches whether another one still renews."""


class DatabaseClaim:
    """The claim of one deployment (a server and a prefix) on a database.

    Marks, fences and rows say which prefix they belong to, and a service that writes rows knows no more than that. So
    two servers with the same prefix would take each other's: messages would end as handled elsewhere, and rows go to
    the relay that is first. The row of the prefix has the identity of the server that uses it. A worker of another
    server watches at its start whether that one is alive: then it is refused, else it takes the row over.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._server = ""
        self._kept = float("-inf")

    async def begin(self, context: ServerContext) -> None:
        """At the start of a worker. Raises OtherServer if a living server has it under the same prefix."""
        prefix = context.keys.prefix
        mine = self._server = await deployment_id(context.client, context.keys, self._server)
        found = await self._claim(prefix, mine)
        if found is None:
            return
        log.warning(
            "the database %r was used under the prefix %r by another server: watching for %.0f s whether it still is",
            self._database, prefix, WATCH_SECONDS,
        )  # fmt: skip
        until = monotonic() + WATCH_SECONDS
        while monotonic() < until:
            await anyio.sleep(KEEP_SECONDS / 4)
            now = await self._claim(prefix, mine)
            if now is None:
                return
            if now != found:
                raise OtherServer(self._refusal(prefix))
        if not await self._database.run(lambda connection: take_over(connection, prefix, found, mine)):
            raise OtherServer(self._refusal(prefix))
        log.warning("the other server has gone: this one uses the database %r under %r now", self._database, prefix)

    async def keep(self, context: ServerContext) -> None:
        """Renew it, now and then. Raises OtherServer if another server has it by now."""
        if monotonic() - self._kept < KEEP_SECONDS:
            return
        before, prefix = self._server, context.keys.prefix
        mine = self._server = await deployment_id(context.client, context.keys, before)
        if before and mine != before:  # the server has lost it, and another worker has made a new one
            await self._database.run(lambda connection: rename(connection, prefix, before, mine))
        if not await self._database.run(lambda connection: renew(connection, prefix, mine)):
            await self._refuse_other(prefix, mine)
        self._kept = monotonic()

    async def _refuse_other(self, prefix: str, mine: str) -> None:
        if await self._claim(prefix, mine) is not None:
            raise OtherServer(self._refusal(prefix))

    async def _claim(self, prefix: str, mine: str) -> tuple[str, int] | None:
        """None: it is ours. Otherwise who has it, and how often it was renewed."""
        try:
            return await self._database.run(lambda connection: claim(connection, prefix, mine))
        except IntegrityError:  # another process was first
            return await self._database.run(lambda connection: claim(connection, prefix, mine))

    def _refusal(self, prefix: str) -> str:
        return (
            f"the database {self._database!r} is used under the prefix {prefix!r} by another server (or database "
            f"number), and both would take each other's rows and marks: give one of them a prefix of its own "
            f"(RSMQ_PREFIX), or a database of its own. If that server is being replaced by this one, stop its workers "
            f"first"
        )

    def __repr__(self) -> str:
        return f"<DatabaseClaim {self._database!r}>"


def claim(connection: Connection, prefix: str, server: str) -> tuple[str, int] | None:
    """Insert the row if there is none. Returns the server and the count of another one that has it."""
    query = select(DEPLOYMENT.c.server, DEPLOYMENT.c.renewals).where(DEPLOYMENT.c.deployment == prefix)
    row = connection.execute(query).one_or_none()
    if row is None:
        connection.execute(DEPLOYMENT.insert(), {"deployment": prefix, "server": server, "renewals": 0})
        return None
    return None if row.server == server else (row.server, row.renewals)


def renew(connection: Connection, prefix: str, server: str) -> bool:
    """Count a renewal. False: the row is not this server's."""
    mine = (DEPLOYMENT.c.deployment == prefix, DEPLOYMENT.c.server == server)
    return bool(connection.execute(update(DEPLOYMENT).where(*mine).values(renewals=DEPLOYMENT.c.renewals + 1)).rowcount)


def rename(connection: Connection, prefix: str, before: str, server: str) -> None:
    """The same deployment has another identity now."""
    mine = (DEPLOYMENT.c.deployment == prefix, DEPLOYMENT.c.server == before)
    connection.execute(update(DEPLOYMENT).where(*mine).values(server=server))


def take_over(connection: Connection, prefix: str, found: tuple[str, int], server: str) -> bool:
    """Take the row of a server that renews no more. False: it has, meanwhile."""
    same = (
        DEPLOYMENT.c.deployment == prefix,
        DEPLOYMENT.c.server == found[0],
        DEPLOYMENT.c.renewals == found[1],
    )
    return bool(connection.execute(update(DEPLOYMENT).where(*same).values(server=server)).rowcount)
