"""A worker that relays an outbox: `python -m tests.sql.outbox_worker REDIS_URL PREFIX DATABASE_URL`. It prints when it
begins to wait for the death of another one."""

from __future__ import annotations

import asyncio
import logging
import sys

from sqlalchemy.ext.asyncio import create_async_engine

from rsmq import Broker, Settings
from rsmq.sql import Outbox


async def main(url: str, prefix: str, database: str) -> None:
    """Until it is killed. The handler is there because a worker has one."""
    broker = Broker(Settings(url=url, prefix=prefix, preflight="warn"))
    broker.include(Outbox(create_async_engine(database)))

    @broker.handler("orders", group="billing", partitions=1)
    async def bill(number: int) -> None: ...

    await broker.run()


if __name__ == "__main__":
    logging.basicConfig(format="%(process)d %(message)s")
    logging.getLogger("rsmq.outbox").setLevel(logging.DEBUG)
    asyncio.run(main(*sys.argv[1:]))
