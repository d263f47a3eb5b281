"""The nodes of a cluster at which this member cannot settle, and whether it can again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import anyio.abc

from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.errors import BrokerError
from rsmq.model.clock import awake
from rsmq.redis.client.connector import Client

PROBE_SECONDS: Final = 1.0
"""Between two questions to a node that has failed."""
FIRST_SECONDS: Final = 1.0
"""So long a node may take for its first answer, before this member joins without its partitions."""


@dataclass(slots=True)
class FailingNode:
    """`since`: `awake` when the first call failed since the last one that was answered."""

    since: float
    trouble: str


class SettlingNodes:
    """Notes which nodes do not settle. One that has failed is asked again until it answers, whether or not anything is
    to be settled there. `check` asks the node of a partition and tells the outcome to `failed` or `answered`."""

    def __init__(self, context: ConsumerContext, check: Callable[[int], Awaitable[None]]) -> None:
        self._context = context
        self._check = check
        self._failing = dict[Client, FailingNode]()
        self._tasks: anyio.abc.TaskGroup | None = None

    @property
    def failing(self) -> Mapping[Client, FailingNode]:
        """Those whose last call has failed."""
        return self._failing

    def use(self, tasks: anyio.abc.TaskGroup | None) -> None:
        """Ask in these tasks; None: they end."""
        self._tasks = tasks

    def failed(self, key: str, error: BrokerError) -> None:
        """A call to the node of a key has failed."""
        node = self._context.client.node_for(key)
        known = self._failing.get(node)
        if known is not None:
            known.trouble = str(error)
            return
        self._failing[node] = FailingNode(awake(), str(error))
        if self._tasks is not None:
            self._tasks.start_soon(self._ask_again, node)

    def answered(self, key: str) -> None:
        """The node of a key has answered a call."""
        if self._failing:
            self._failing.pop(self._context.client.node_for(key), None)

    async def open(self, partitions: list[int]) -> None:
        """Ask the nodes of these for the first time. One that gives no answer fails."""
        async with anyio.create_task_group() as tasks:
            for partition in partitions:
                tasks.start_soon(self._open, partition)

    async def _open(self, partition: int) -> None:
        with anyio.move_on_after(FIRST_SECONDS) as scope, suppress(BrokerError):
            await self._check(partition)
        if scope.cancelled_caught:
            self.failed(self._stream(partition), BrokerError("no answer"))

    async def _ask_again(self, node: Client) -> None:
        while node in self._failing:
            await asyncio.sleep(PROBE_SECONDS)
            there = (each for each in self._context.topic.numbers if self._node(each) is node)
            partition = next(there, None)
            if partition is None:  # its slots have moved
                self._failing.pop(node, None)
                return
            with suppress(BrokerError):
                await self._check(partition)

    def _stream(self, partition: int) -> str:
        return self._context.keys.stream(self._context.topic.name, partition)

    def _node(self, partition: int) -> Client:
        return self._context.client.node_for(self._stream(partition))

    def __repr__(self) -> str:
        return f"<SettlingNodes {self._context.name} failing={list(self._failing)}>"
