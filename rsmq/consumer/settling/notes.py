"""What a handler keeps about its message until that is settled: steps, progress, and a result that is to be kept.

Steps and progress are written while the handler runs, under the fence of its lease. The settlement removes them, in the
call that stores the outputs; a result is stored there like an output. Without any of these nothing here runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

import anyio.abc
from anyio import from_thread

from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.lane import Lane
from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError, StaleEpoch, TooLarge
from rsmq.model.clock import now_ms
from rsmq.model.encoding import Binding
from rsmq.model.in_loop import is_in_loop
from rsmq.model.json import decode_json
from rsmq.model.kept_result import KeptResult, result_binding, step_binding
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.message import JSON, Message, encode_payload, has_own_id
from rsmq.model.progress import write_progress
from rsmq.producer.output import Output, ResultKey
from rsmq.redis.scripts import KEEP_NOTE, OK, Ask

log = logging.getLogger("rsmq.settle")

MOST_STEPS: Final = 100
LARGEST_STEP: Final = 64 << 10
LARGEST_STEPS: Final = 256 << 10
"""Bytes of one step, and of all steps of a message: its dead letter takes them along."""
LONGEST_NAME: Final = 100
PROGRESS_SECONDS: Final = 1.0
"""Between two writes of the progress of a message."""
PAUSE: Final = 0.1
"""Seconds before a step is kept again, while the server is away."""


class Notes:
    """The notes of the messages that run in one member. `runs` says whether the handler of a message runs now."""

    def __init__(self, context: ConsumerContext, ask: Ask, on_stale: Callable[[Lane], None]) -> None:
        self._context = context
        self._client = context.client
        self._ask = ask
        self._on_stale = on_stale
        self._throttled = ThrottledLog(log)
        self._runs: Callable[[Message], bool] = lambda _message: False
        self._tasks: anyio.abc.TaskGroup | None = None
        self._latest: dict[Message, tuple[Lane, bytes]] = {}
        """Progress that is not written yet."""
        self._resting = set[Message]()
        """Those whose progress was written within the last second."""
        self.wants_results = False
        """Whether a result of any message so far is kept."""

    def use(self, tasks: anyio.abc.TaskGroup | None) -> None:
        """The tasks of the settler, while it runs."""
        self._tasks = tasks

    def check_by(self, runs: Callable[[Message], bool]) -> None:
        """This says which messages run."""
        self._runs = runs

    # -- results --------------------------------------------------------------------------------------------------

    def want_result(self) -> None:
        """There is a message whose result is kept."""
        self.wants_results = True

    def keep_result(self, message: Message, lane: Lane, value: Any) -> None:
        """Keep what the handler of a message has returned, with its settlement. Raises NotJson and TooLarge: then the
        attempt has failed."""
        data, kind = encode_payload(value)
        binding = result_binding(lane.group, message.id)
        data, enc = self._context.encoding.encode(data, binding, None, kind)
        limit = self._context.settings.payload_limit
        if len(data) > limit:
            raise TooLarge(len(data), limit)
        self._keep(message, lane, KeptResult(data, kind, enc))

    def keep_failure(self, message: Message, lane: Lane, reason: str, error: str) -> None:
        """Keep that a message ends without a result, if its publisher wants one."""
        if not message.is_plain and message.result_ms is not None:
            self._keep(message, lane, KeptResult(reason=reason, error=error))

    def _keep(self, message: Message, lane: Lane, result: KeptResult) -> None:
        if message.is_plain or message.result_ms is None:
            return
        name = self._context.keys.result(lane.topic, lane.partition, lane.group, message.id)
        fields, own = (result.write(), str(message.result_ms)), ResultKey(name, message.result_ms)
        about = (self._context.topic, message.partition, message.id, fields, len(fields[0]), "")
        lane.outgoing.keep_result(message, Output(*about, is_once=False, own=own))

    # -- progress -------------------------------------------------------------------------------------------------

    async def progress(self, message: Message, lane: Lane, done: float, text: str) -> None:
        """Note how far a handler has come: at once, or if that was done within the last second, at its end."""
        self._check(message, "message.progress")
        batch = "" if message.is_plain or message.member is None else message.member.home
        value = write_progress(done, text, now_ms(), batch)
        lane.outgoing.note(message)
        self._latest[message] = lane, value
        if message not in self._resting:
            self._resting.add(message)
            try:
                await self._write(message)
            finally:
                if self._tasks is None:
                    self._forget(message)
                else:
                    self._tasks.start_soon(self._rest, message)

    async def _rest(self, message: Message) -> None:
        """Write what comes, once a second, as long as the handler runs."""
        try:
            while True:
                await asyncio.sleep(PROGRESS_SECONDS)
                if message not in self._latest or not self._runs(message):
                    return
                await self._write(message)
        finally:
            self._forget(message)

    def _forget(self, message: Message) -> None:
        self._resting.discard(message)
        self._latest.pop(message, None)

    async def _write(self, message: Message) -> None:
        """Without the server it is dropped."""
        lane, value = self._latest.pop(message)
        try:
            await self._call(message, lane, "", value)
        except BrokerError as error:
            self._throttled.warn("the progress of messages is not written", error)

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self, message: Message, lane: Lane, name: str) -> Step:
        """A step of a message that runs. Raises ConfigError for a name that none can have."""
        is_possible = (
            isinstance(name, str) and 1 <= len(name) <= LONGEST_NAME and name.isprintable() and "|" not in name
        )
        if not is_possible:
            raise ConfigError(
                f"a step cannot be called {name!r}: use 1 to {LONGEST_NAME} printable characters other than |"
            )
        return Step(self, message, lane, name)

    async def read_step(self, message: Message, lane: Lane, name: str) -> tuple[bool, Any]:
        """Whether a step is kept, and its result. Raises BrokerError, Malformed, and CannotDecode without its key."""
        self._check(message, "message.step")
        lane.outgoing.note(message)
        found = await self._client.execute_command("HGET", lane.steps_key, message.entry_id + b"|" + name.encode())
        if found is None:
            return False, None
        kept = KeptResult.read(found)
        data = kept.data
        if kept.enc:
            identity = self._binding(message, name).encode()
            data = self._context.encoding.undo(data, Binding(identity, None, kept.type.encode(), kept.enc.encode()))
        if kept.type == JSON:
            return True, decode_json(data)
        return True, data.decode() if kept.type.startswith("text/") else data

    async def keep_step(self, message: Message, lane: Lane, name: str, result: Any) -> None:
        """Keep a step. Waits while the server is away; raises StaleEpoch when the lease is over."""
        self._check(message, "message.step")
        data, kind = encode_payload(result)
        data, enc = self._context.encoding.encode(data, self._binding(message, name), None, kind)
        value = KeptResult(data, kind, enc).write()
        if len(value) > LARGEST_STEP:
            raise TooLarge(len(value), LARGEST_STEP, "")
        while lane.lease.is_held():
            try:
                word = await self._call(message, lane, name, value)
            except BrokerUnavailable as error:
                self._throttled.warn("steps of messages wait for the server", error)
                await asyncio.sleep(PAUSE)
                continue
            if word == b"FULL":
                raise ConfigError(
                    f"{message} has more than {MOST_STEPS} steps, or their results have more than {LARGEST_STEPS} "
                    f"bytes: overwrite one step as a cursor, or keep the data elsewhere"
                )
            if word == OK:
                return
            break
        raise StaleEpoch(f"step {name!r} of {message} is not kept: another member has the message by now")

    @staticmethod
    def _binding(message: Message, name: str) -> str:
        return step_binding(message.group, message.id if has_own_id(message) else "", name)

    # -- both -----------------------------------------------------------------------------------------------------

    def _check(self, message: Message, what: str) -> None:
        if not self._runs(message):
            raise ConfigError(f"the handler of {message} has ended: await {what}(...) inside the handler")

    async def _call(self, message: Message, lane: Lane, step: str, value: bytes) -> bytes:
        keys = (lane.stream, lane.lease_key, lane.steps_key, lane.progress_key)
        fenced = (self._context.member, lane.epoch, lane.group, message.entry_id)
        reply = await self._ask(KEEP_NOTE, keys, (*fenced, step, value, MOST_STEPS, LARGEST_STEPS))
        if lane.epoch and reply[0] not in (OK, b"FULL"):
            self._on_stale(lane)
        return bytes(reply[0])

    def __repr__(self) -> str:
        return f"<Notes resting={len(self._resting)}>"


class Step:
    """A part of a handler: `async with`, or `with` in a handler that is a plain function.

    `is_done`: it was kept before. `result`: what was kept, None before that. What is assigned to it is kept at the end
    of the block, unless that raises.
    """

    def __init__(self, notes: Notes, message: Message, lane: Lane, name: str) -> None:
        self._notes = notes
        self._message = message
        self._lane = lane
        self.name = name
        self.is_done = False
        self._result: Any = None
        self._is_assigned = False

    @property
    def result(self) -> Any:
        """What was kept, or what is to be kept."""
        return self._result

    @result.setter
    def result(self, value: Any) -> None:
        self._result = value
        self._is_assigned = True

    async def __aenter__(self) -> Self:
        if not is_in_loop():
            raise ConfigError(f"a plain function writes `with message.step({self.name!r}) as step:`")
        await self._enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if kind is None:
            await self._leave()

    def __enter__(self) -> Self:
        if is_in_loop():
            raise ConfigError(f"an async function writes `async with message.step({self.name!r}) as step:`")
        from_thread.run(self._enter)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            from_thread.run(self._leave)

    async def _enter(self) -> None:
        self.is_done, self._result = await self._notes.read_step(self._message, self._lane, self.name)
        self._is_assigned = False

    async def _leave(self) -> None:
        if self._is_assigned or not self.is_done:
            await self._notes.keep_step(self._message, self._lane, self.name, self._result)
            self.is_done = True

    def __repr__(self) -> str:
        return f"<Step {self.name}{' done' if self.is_done else ''}>"
