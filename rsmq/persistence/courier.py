"""The courier: script calls of all inboxes of this process, gathered into one write, repeated while nobody answers."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import anyio
import anyio.abc
from redis.exceptions import NoScriptError

from rsmq.clock import monotonic
from rsmq.connect import Client
from rsmq.errors import BrokerUnavailable
from rsmq.fleet import Fleet
from rsmq.script import Script, Value
from rsmq.settings import Settings
from rsmq.wire import pack

log = logging.getLogger("rsmq.courier")

LANES: Final = 2
"""Exchanges under way: while the server works on one, this process packs the next and reads the replies of the last."""
MOST_CALLS: Final = 100
MOST_BYTES: Final = 64 << 10
"""One write holds no more: small enough that both lanes have some of what waits."""
LONGEST_PAUSE: Final = 1.0
CLOSED: Final = "the broker was closed before the server confirmed"


class Call(ABC):
    """One script call under way. It must be repeatable, for its reply may get lost."""

    __slots__ = ("args", "deadline", "keys", "packed", "script")

    def __init__(self, script: Script, keys: Sequence[str], args: Sequence[Value]) -> None:
        self.script, self.keys, self.args = script, keys, args
        self.deadline = 0.0
        self.packed = b""

    @property
    def is_moot(self) -> bool:
        """Whether nobody wants the reply any more."""
        return False

    @abstractmethod
    def done(self, reply: Any) -> None:
        """Take the reply, or the error when patience has ended."""


class Question(Call):
    """A call whose reply somebody waits for."""

    __slots__ = ("answer",)

    def __init__(self, script: Script, keys: Sequence[str], args: Sequence[Value]) -> None:
        super().__init__(script, keys, args)
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    @property
    def is_moot(self) -> bool:
        return self.answer.cancelled()

    def done(self, reply: Any) -> None:
        if self.answer.done():
            return
        if isinstance(reply, Exception):
            self.answer.set_exception(reply)
        else:
            self.answer.set_result(reply)


class Courier:
    """Group commit: while one exchange is under way, what is asked meanwhile gathers for the next one.

    Calls asked at the same time may be carried out in any order if one of them has to be repeated: who needs an order
    waits for the answer.
    """

    def __init__(self, client: Client, settings: Settings) -> None:
        self._lanes = tuple(Fleet(client) for _ in range(LANES))
        self._patience = settings.unavailable_timeout.total_seconds()
        self._waiting: list[Call] = []
        self._flying: dict[Fleet, list[Call]] = {}
        self._wake = asyncio.Event()
        self._pause = 0.0
        self._is_closed = False

    def carry(self, call: Call) -> None:
        """Take a call; its `done` gets the reply, or BrokerUnavailable when nobody has answered in time."""
        if self._is_closed:  # somebody was on the way here when the broker was closed: nobody else would tell him
            call.done(BrokerUnavailable(CLOSED))
            return
        call.deadline = monotonic() + self._patience
        call.packed = pack(call.script.command(call.keys, call.args))
        self._waiting.append(call)
        self._wake.set()

    def ask(self, script: Script, keys: Sequence[str], args: Sequence[Value]) -> asyncio.Future[Any]:
        """The reply to come; its future raises BrokerUnavailable when nobody has answered in time."""
        question = Question(script, keys, args)
        self.carry(question)
        return question.answer

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Carry until cancelled; nobody is left waiting then."""
        task_status.started()
        try:
            async with anyio.create_task_group() as tasks:
                for lane in self._lanes:
                    tasks.start_soon(self._drive, lane)
        finally:
            with anyio.CancelScope(shield=True):
                for lane in self._lanes:
                    await lane.close()
            self._is_closed = True
            calls = [call for group in (*self._flying.values(), self._waiting) for call in group]
            self._flying, self._waiting = {}, []
            for call in calls:
                call.done(BrokerUnavailable(CLOSED))

    async def _drive(self, lane: Fleet) -> None:
        """One exchange after the other, while something waits."""
        while True:
            while self._waiting:
                await self._round(lane)
            self._wake.clear()
            await self._wake.wait()

    async def _round(self, lane: Fleet) -> None:
        """One exchange; what got no answer stands first in line for the next one."""
        flying = self._flying[lane] = self._take()
        replies = await lane.exchange([(call.keys[0], call.packed) for call in flying])
        self._flying[lane] = []
        again, loaded = list[Call](), set[Script]()
        trouble: Exception | None = None
        for call, reply in zip(flying, replies, strict=True):
            if not isinstance(reply, Exception):
                call.done(reply)
            elif isinstance(reply, NoScriptError):
                if call.script not in loaded:  # the source goes once; on another node the next round sends it again
                    call.packed = pack(call.script.full_command(call.keys, call.args))
                    loaded.add(call.script)
                again.append(call)
            elif isinstance(reply, BrokerUnavailable) and monotonic() < call.deadline:
                trouble = reply
                again.append(call)
            else:
                call.done(reply)
        self._waiting[:0] = again
        await self._rest(trouble)

    def _take(self) -> list[Call]:
        """As many calls as one exchange may hold, the oldest first, without those that nobody waits for any more."""
        taken, size, count = list[Call](), 0, 0
        for call in self._waiting:
            if len(taken) == MOST_CALLS or size >= MOST_BYTES:
                break
            count += 1
            if not call.is_moot:
                taken.append(call)
                size += len(call.packed)
        del self._waiting[:count]
        return taken

    async def _rest(self, trouble: Exception | None) -> None:
        """Back off while the server is away."""
        if trouble is None:
            self._pause = 0.0
            return
        if not self._pause:
            log.warning("inboxes wait for the server: %s", trouble)
        self._pause = min(LONGEST_PAUSE, self._pause * 2 or 0.02)
        await anyio.sleep(self._pause)

    def __repr__(self) -> str:
        return f"<Courier waiting={len(self._waiting)} flying={sum(map(len, self._flying.values()))}>"
