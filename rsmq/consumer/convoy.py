"""A convoy: commands that many tasks await one by one, and that travel together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.abc
from redis.exceptions import NoScriptError

from rsmq.connect import Client
from rsmq.errors import BrokerUnavailable
from rsmq.fleet import Fleet
from rsmq.script import Script, Value
from rsmq.slot import Key
from rsmq.wire import pack


class Convoy:
    """Group commit for what is rare, but comes in crowds: the charges of a take-over, the retries of an outage.

    What is asked while one write is on its way leaves with the next. On a cluster, and while it does not run, each
    command goes by itself: one node that hangs must not hold up the messages of the others.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: list[tuple[Key, bytes, asyncio.Future[Any]]] = []
        self._due = asyncio.Event()
        self._is_running = False

    async def ask(self, script: Script, keys: Sequence[str], args: Sequence[Value]) -> Any:
        """What the server says. Raises BrokerError; after BrokerUnavailable nobody knows whether it was executed."""
        if not self._is_running:
            return await script(self._client, keys, args)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((keys[0], pack(script.command(keys, args)), answer))
        self._due.set()
        reply = await answer
        if isinstance(reply, NoScriptError):
            return await script(self._client, keys, args)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Carry until cancelled; nobody is left waiting then."""
        fleet, going = Fleet(self._client), list[tuple[Key, bytes, asyncio.Future[Any]]]()
        self._is_running = not self._client.is_cluster
        task_status.started()
        try:
            while True:
                await self._due.wait()
                self._due.clear()
                going, self._waiting = self._waiting, []
                replies = await fleet.exchange([(key, packed) for key, packed, _ in going])
                for (_, _, answer), reply in zip(going, replies, strict=True):
                    if not answer.done():  # else whoever asked was cancelled
                        answer.set_result(reply)
        finally:
            self._is_running = False
            for _, _, answer in (*going, *self._waiting):
                if not answer.done():
                    answer.set_result(BrokerUnavailable("the worker stops"))
            await fleet.close()

    def __repr__(self) -> str:
        return f"<Convoy waiting={len(self._waiting)}>"
