"""A process that ends itself by SIGKILL at a step of its work: before or after one of its calls to a server.

`python -m tests.chaos.dying_process relay STEP before|after URL PREFIX DATABASE_URL` relays an outbox;
`... erase STEP before|after URL PREFIX KEY` erases a key; `... handle 0 after URL PREFIX` handles what is sent.
STEP 0: it does not end by itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import timedelta
from functools import wraps
from typing import Any, Final

from sqlalchemy.ext.asyncio import create_async_engine

from rsmq import Broker, Settings
from rsmq.redis.client.client import Client
from rsmq.redis.client.raw_connection import ShardedConnection
from rsmq.sql import Outbox
from rsmq.sql.database import Database
from rsmq.sql.relay import OutboxRelay
from tests.control.erased import sender

IS_WORK: Final = ContextVar("IS_WORK", default=False)
"""Whether calls count: those of a heartbeat do not."""

Call = Callable[..., Awaitable[Any]]


class Steps:
    """Counts the calls of the work, and kills the process at one of them."""

    def __init__(self, last: int, when: str) -> None:
        self._last, self._is_after, self._count = last, when == "after", 0

    def counted(self, call: Call) -> Call:
        """The same call, as a step."""

        @wraps(call)
        async def step(*args: Any, **options: Any) -> Any:
            if not IS_WORK.get():
                return await call(*args, **options)
            self._count += 1
            is_last = self._count == self._last
            if is_last and not self._is_after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = await call(*args, **options)
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return step


def work(call: Call) -> Call:
    """The same call, whose calls count."""

    @wraps(call)
    async def counting(*args: Any, **options: Any) -> Any:
        token = IS_WORK.set(True)
        try:
            return await call(*args, **options)
        finally:
            IS_WORK.reset(token)

    return counting


async def relay(broker: Broker, database: str) -> None:
    """Until it is killed. Nothing of what it relays is handled here."""
    broker.include(Outbox(create_async_engine(database), poll=timedelta(milliseconds=5)))

    @broker.handler("elsewhere", group="billing", partitions=1)
    async def bill(number: int) -> None: ...

    await broker.run()


async def erase(broker: Broker, key: str) -> None:
    """Once."""
    async with broker:
        await work(broker.erase)(key, timeout=timedelta(milliseconds=1))


async def handle(broker: Broker) -> None:
    """Until it is killed."""
    sender(broker)
    await broker.run()


def main(what: str, step: str, when: str, url: str, prefix: str, *more: str) -> None:
    """Work, and end at the step."""
    steps = Steps(int(step), when)
    for owner, names in ((Client, ("execute_command", "pipelined")), (ShardedConnection, ("exchange",)),
                         (Database, ("run",))):  # fmt: skip
        for name in names:
            setattr(owner, name, steps.counted(getattr(owner, name)))
    OutboxRelay.relay_once = work(OutboxRelay.relay_once)  # type: ignore[method-assign]
    broker = Broker(Settings(url=url, prefix=prefix, preflight="warn", partitions=2, lease_ttl=timedelta(seconds=1)))
    asyncio.run({"relay": relay, "erase": erase, "handle": handle}[what](broker, *more))


if __name__ == "__main__":
    main(*sys.argv[1:])
