"""Script calls of many tasks, gathered into one write: group commit for frequent concurrent calls."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import anyio
import anyio.abc

from rsmq.errors import BrokerUnavailable
from rsmq.model.backoff import Backoff
from rsmq.model.clock import awake
from rsmq.model.page_limit import PageLimit
from rsmq.redis.client.connector import Client
from rsmq.redis.client.raw_connection import ANOTHER_SERVER, ShardedConnection, pack
from rsmq.redis.scripts import PlainCommand, Script, Value

log = logging.getLogger("rsmq.batch")

MOST_CALLS: Final = 100
MOST_BYTES: Final = 64 << 10
"""With several connections one write holds no more: small enough that each gets some of what waits."""
FIRST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 1.0
"""Seconds between attempts while the server is away."""
CLOSED: Final = "the broker was closed before the server confirmed"


class Call(ABC):
    """One script call. With patience it must be repeatable, for its reply may get lost.

    `is_page`: its answer may be too large for what stands between us and the server, so it is not repeated as it is.
    """

    __slots__ = ("deadline", "keys", "packed")
    is_page = False

    def __init__(self, script: Script | PlainCommand, keys: Sequence[str], args: Sequence[Value]) -> None:
        self.keys = keys
        self.packed = pack(script.command(keys, args))
        self.deadline = 0.0

    @property
    def key(self) -> str:
        """It decides the node."""
        return self.keys[0] if self.keys else ""

    @property
    def is_cancelled(self) -> bool:
        """Whether the caller has stopped waiting for the reply."""
        return False

    @property
    def is_outdated(self) -> bool:
        """Whether it was meant for a server process that another one has replaced. It ends with BrokerUnavailable."""
        return False

    @abstractmethod
    def done(self, reply: Any) -> None:
        """Take the reply, or the error when the call has failed for good."""


class AwaitedCall(Call):
    """A call whose reply is awaited by a task."""

    __slots__ = ("reply",)

    def __init__(self, script: Script | PlainCommand, keys: Sequence[str], args: Sequence[Value]) -> None:
        super().__init__(script, keys, args)
        self.reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    @property
    def is_cancelled(self) -> bool:
        return self.reply.cancelled()

    def done(self, reply: Any) -> None:
        if self.reply.done():
            return
        if isinstance(reply, Exception):
            self.reply.set_exception(reply)
        else:
            self.reply.set_result(reply)


class PageCall(AwaitedCall):
    """A call whose answer is a page."""

    __slots__ = ()
    is_page = True


class ScriptBatcher:
    """Each caller waits for its own reply; the calls made while one write is under way share the next one.

    A call that got no answer is repeated for `patience` seconds; without patience the caller gets the error at once.
    With two connections this process packs the next write while the server works on the last. Calls made at the same
    time may run in any order if one of them is repeated: a caller that needs an order waits for the reply.
    """

    def __init__(
        self,
        client: Client,
        *,
        patience: float = 0.0,
        connections: int = 1,
        is_bound: bool = False,
        log: logging.Logger = log,
    ) -> None:
        """`is_bound`: nothing goes to another server process before each call was asked whether it is outdated."""
        self._client = client
        self._patience = patience
        self._log = log
        self._connections = tuple(ShardedConnection(client, is_bound=is_bound) for _ in range(connections))
        self._waiting: list[Call] = []
        self._in_flight: dict[ShardedConnection, list[Call]] = {}
        self._idle: list[asyncio.Future[None]] = []
        self._is_woken = False
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self.page_limit = PageLimit()
        """Of all answers to one write, and of the one to a call of `submit_page`."""
        self._is_closed = False
        self._tasks: anyio.abc.TaskGroup | None = None
        self._by_node: dict[Client, ScriptBatcher] = {}

    async def ask(self, script: Script, keys: Sequence[str], args: Sequence[Value]) -> Any:
        """The reply. On a cluster each node has a batcher of its own, because one node that hangs must not hold up the
        messages of the others. While the batcher does not run, the call is written by itself. After BrokerUnavailable
        it may or may not have been executed; not any more once the node has answered a later call.
        """
        if self._tasks is None:
            return await script(self._client, keys, args)
        if not self._client.is_cluster:
            return await self.submit(script, keys, args)
        node = self._client.node_for(keys[0])
        if node not in self._by_node:
            self._by_node[node] = ScriptBatcher(self._client)
            self._tasks.start_soon(self._by_node[node].run)
        return await self._by_node[node].submit(script, keys, args)

    def submit(self, script: Script | PlainCommand, keys: Sequence[str], args: Sequence[Value]) -> asyncio.Future[Any]:
        """Queue a call and return its reply to come. It waits for `run` to start."""
        call = AwaitedCall(script, keys, args)
        self.add(call)
        return call.reply

    def submit_page(self, script: Script, keys: Sequence[str], args: Sequence[Value]) -> asyncio.Future[Any]:
        """The same for a page, whose size the caller takes from `page_limit`. If the connection breaks at this answer
        alone, the reply is that error (`is_broken`): ask for a smaller one."""
        call = PageCall(script, keys, args)
        self.add(call)
        return call.reply

    def add(self, call: Call) -> None:
        """Queue a call; its `done` gets the reply."""
        if self._is_closed:
            call.done(BrokerUnavailable(CLOSED))
            return
        call.deadline = awake() + self._patience
        self._waiting.append(call)
        self._wake()

    async def disconnect(self) -> None:
        """Close the connections. The next write opens them again, and what is on its way fails."""
        for connection in self._connections:
            await connection.close()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; every call that is left then gets BrokerUnavailable."""
        try:
            async with anyio.create_task_group() as self._tasks:
                task_status.started()
                for connection in self._connections:
                    self._tasks.start_soon(self._serve, connection)
        finally:
            self._tasks = None
            self._is_closed = True
            with anyio.CancelScope(shield=True):
                for connection in self._connections:
                    await connection.close()
            left = [call for calls in (*self._in_flight.values(), self._waiting) for call in calls]
            self._in_flight = {}
            self._waiting = []
            for call in left:
                call.done(BrokerUnavailable(CLOSED))

    async def _serve(self, connection: ShardedConnection) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._waiting:
                await self._exchange(connection)
            idle = loop.create_future()
            self._idle.append(idle)
            await idle
            self._is_woken = False

    def _wake(self) -> None:
        """Wake one idle connection: it takes all that waits when its turn comes, or wakes the next one."""
        if self._idle and not self._is_woken:
            idle = self._idle.pop()
            if not idle.done():  # it is cancelled while the batcher ends
                self._is_woken = True
                idle.set_result(None)

    async def _exchange(self, connection: ShardedConnection) -> None:
        """One write and its replies. A call that is to be repeated goes to the front of the queue."""
        calls = self._in_flight[connection] = self._take()
        if self._waiting:
            self._wake()
        part = self.page_limit.part
        replies = await connection.exchange([(call.key, call.packed) for call in calls])
        self._in_flight[connection] = []
        broken = next((each for each in replies if isinstance(each, BrokerUnavailable) and each.is_broken), None)
        if broken is None:
            self.page_limit.came()
        elif len(calls) > 1 or calls[0].is_page:
            self.page_limit.broke(part, broken)
        again, trouble = list[Call](), ""
        for call, reply in zip(calls, replies, strict=True):
            is_lost = isinstance(reply, BrokerUnavailable) and awake() < call.deadline
            if is_lost and not (call.is_page and len(calls) == 1 and reply.is_broken):
                again.append(call)
                trouble = str(reply)
            else:
                call.done(reply)
        if not again:
            self._backoff.reset()
            return
        self._waiting[:0] = again
        if not self._backoff.failures:
            self._log.warning("calls wait for the server: %s", trouble)
        await anyio.sleep(self._backoff.next())

    def _take(self) -> list[Call]:
        """The oldest calls, as many as one write may hold, without those that were cancelled or are outdated."""
        if len(self._connections) == 1 and self.page_limit.part == 1:
            taken, self._waiting = self._waiting, []
            return [call for call in taken if self._is_wanted(call)]
        taken, size, count, most = list[Call](), 0, 0, self.page_limit.of(MOST_CALLS)
        for call in self._waiting:
            if len(taken) == most or size >= MOST_BYTES:
                break
            count += 1
            if self._is_wanted(call):
                taken.append(call)
                size += len(call.packed)
        del self._waiting[:count]
        return taken

    @staticmethod
    def _is_wanted(call: Call) -> bool:
        if call.is_outdated:
            call.done(BrokerUnavailable(ANOTHER_SERVER))
            return False
        return not call.is_cancelled

    def __repr__(self) -> str:
        in_flight = sum(map(len, self._in_flight.values()))
        return f"<ScriptBatcher waiting={len(self._waiting)} in_flight={in_flight}>"
