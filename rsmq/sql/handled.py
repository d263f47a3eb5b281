"""Handled messages in a database: the marks of one call, whether a commit has happened, and what is old."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import cached_property
from typing import Any, Final

import anyio
import anyio.from_thread
from sqlalchemy import Connection

from rsmq.errors import BrokerError, ConfigError, StaleEpoch
from rsmq.handler.retry import AlreadyHandled, BatchRolledBack
from rsmq.model.clock import now_ms, to_ms
from rsmq.model.message import Message, has_outputs
from rsmq.redis.leadership import TTL, Leadership
from rsmq.redis.server_context import ServerContext
from rsmq.sql.database import Database
from rsmq.sql.deployment import DatabaseClaim
from rsmq.sql.mark import Mark, lane_runs_of, marks_of
from rsmq.sql.marks import KEPT, already, delete_marks, handled_of, lanes, raise_fences, write_mark, write_marks
from rsmq.sql.settled_floor import settled_floor

log = logging.getLogger("rsmq.effects")

PRUNE_SECONDS: Final = 60.0
MOST_PARKED: Final = 5000
"""With more messages that wait for a retry, a group's marks are kept back to the oldest entry of the partition."""
RESOLVE_SECONDS: Final = 5.0


class CommitStage(Enum):
    """How far the transaction of a call has got. A call that is given up may run on in its thread."""

    OPEN = auto()
    CLOSED = auto()
    """It commits no more: its messages end in another way."""
    COMMITTING = auto()
    COMMITTED = auto()
    UNKNOWN = auto()
    """It has failed when it was about to commit, or in another way that only the database can tell."""


class MarkedWork:
    """The messages of one call of a handler, and their marks. `name`: of the dependency, for errors."""

    def __init__(self, work: Message | list[Message] | None, name: str) -> None:
        self._stage = CommitStage.OPEN
        self._lock = threading.Lock()
        self.name = name
        self.is_batch = isinstance(work, list)
        self.messages = messages_of(work, name)
        self.lane_runs = lane_runs_of(self.messages)  # now: a worker that wakes up late may have a newer epoch

    @cached_property
    def marks(self) -> list[Mark]:
        """The mark of each message."""
        return marks_of(self.messages, self.lane_runs)

    @property
    def is_redelivered(self) -> bool:
        """Whether an earlier run may have committed."""
        return any([message.is_redelivered for message in self.messages])  # noqa: C419  a batch has hundreds

    def begin_commit(self) -> None:
        """Before the marks are written. Raises RolledBack if the messages have ended in another way meanwhile."""
        with self._lock:
            if self._stage is CommitStage.CLOSED:
                raise RolledBack(f"{self.name}: the call was given up, and its messages have ended in another way")
            self._stage = CommitStage.COMMITTING

    def end(self, *, is_committed: bool) -> None:
        """After the transaction."""
        with self._lock:
            if is_committed:
                self._stage = CommitStage.COMMITTED
            elif self._stage is CommitStage.COMMITTING:
                self._stage = CommitStage.UNKNOWN
            elif self._stage is CommitStage.OPEN:
                self._stage = CommitStage.CLOSED

    async def close(self) -> CommitStage:
        """Let it commit no more, or wait for the end of a commit that has begun."""
        while True:
            with self._lock:
                if self._stage is CommitStage.OPEN:
                    self._stage = CommitStage.CLOSED
                if self._stage is not CommitStage.COMMITTING:
                    return self._stage
            await anyio.sleep(0.01)

    def skip_handled(self, connection: Connection) -> None:
        """Raise AlreadyHandled if an earlier run has committed, or BatchRolledBack if one has for some of a batch."""
        late = [mark for message, mark in zip(self.messages, self.marks, strict=True) if message.is_redelivered]
        self.raise_for({mark: already(mark) for mark in handled_of(connection, late)})

    def write_marks(self, connection: Connection) -> None:
        """The last statements of the transaction. Raises if it must not commit."""
        if len(self.marks) > 1:
            self.raise_for(write_marks(connection, self.marks))
            return
        try:
            write_mark(connection, self.marks[0])
        except (AlreadyHandled, StaleEpoch) as error:
            self.raise_for({self.marks[0]: error})

    def refuse_outputs(self, instead: str) -> None:
        """Raise ConfigError if the handler has published by a message: a mark that is found would skip the output."""
        if any([has_outputs(message) for message in self.messages]):  # noqa: C419
            raise ConfigError(
                f"message.publish in a handler with {self.name}: its output is lost if the worker dies between the "
                f"commit and the settlement. Write `{instead}`, which commits with the rest, or publish in a handler "
                f"without {self.name}"
            )

    def raise_for(self, refused: dict[Mark, Exception]) -> None:
        """Raise for the messages that must not commit."""
        if refused and self.is_batch:
            raise BatchRolledBack([refused.get(mark) for mark in self.marks])
        for error in refused.values():
            raise error


class HandledMessages:
    """The marks in a database; its workers delete old ones."""

    _commits: Final = True
    """Not for shared distribution: without a lease there is no fence, and a mark would outlive a reset of the group.
    And what a batch handler returns must be known before the commit."""
    database: Database

    @cached_property
    def _claim(self) -> DatabaseClaim:
        return DatabaseClaim(self.database)

    async def claim(self, context: ServerContext) -> None:
        """Before handlers run: see `DatabaseClaim`."""
        await self._claim.begin(context)

    @cached_property
    def _calls(self) -> dict[int, MarkedWork]:
        """The calls that have not committed, by message: a message stays the same object until its call has ended."""
        return {}

    @contextmanager
    def following(self, work: MarkedWork) -> Iterator[None]:
        """While a transaction runs. One that has failed is remembered until its message is settled."""
        self._calls.update((id(message), work) for message in work.messages)
        is_committed = False
        try:
            yield
            is_committed = True
        finally:
            work.end(is_committed=is_committed)
            for message in work.messages if is_committed else ():
                self._calls.pop(id(message), None)

    async def committed(self, messages: Sequence[Message]) -> list[bool]:
        """Whether the effects of each message are committed, by this attempt or an earlier one.

        Final for those that are not: a call that was given up commits no more, and an earlier owner is refused by the
        fence, which is raised first. Raises StaleEpoch if there is a newer owner, and other errors of the database.
        """
        unknown = list[Message]()
        for message in messages:
            work = self._calls.get(id(message))
            stage = CommitStage.UNKNOWN if work is None else await work.close()
            if work is None or stage is not CommitStage.CLOSED or message.is_redelivered:
                unknown.append(message)
        marks, found = marks_of(unknown), set[Mark]()
        if marks:
            await self.database.run(lambda connection: raise_fences(connection, marks))
            if any(id(message) in self._calls for message in unknown):  # perhaps about to commit, in the database
                await self.is_marked(marks[0])
            found = await self.database.run(lambda connection: handled_of(connection, marks))
        done = {id(message) for message, mark in zip(unknown, marks, strict=True) if mark in found}
        for message in messages:
            self._calls.pop(id(message), None)
        return [id(message) in done for message in messages]

    async def is_marked(self, mark: Mark) -> bool:
        """Whether a mark is committed. To write it, and roll back, waits for a transaction that is about to commit."""
        try:
            await self.database.run(lambda connection: write_and_roll_back(connection, mark))
        except AlreadyHandled:
            return True
        except RolledBack:
            return False
        raise AssertionError("write_and_roll_back always raises")

    async def _has_committed(self, mark: Mark) -> bool:
        """Whether the transaction whose commit had no answer was committed.

        To write the same mark waits for a transaction that is still about to commit. So the answer is final. Of a batch
        one mark says it for all.
        """
        with anyio.move_on_after(RESOLVE_SECONDS):
            while True:
                try:
                    return await self.is_marked(mark)
                except Exception as error:
                    log.info("it is unknown yet whether %s was committed: %s", mark, error)
                    await anyio.sleep(0.1)
        return False

    def _has_committed_plain(self, mark: Mark) -> bool:
        """Whether a mark is committed, asked by the thread of a plain function."""
        return anyio.from_thread.run(self._has_committed, mark)

    # -- in the worker ----------------------------------------------------------------------------------------------

    async def serve(self, context: ServerContext) -> None:
        """Delete old marks, in one worker for all; for the worker."""
        leadership = Leadership(context, f"effects.{await self.database.identity()}")
        next_round = 0.0
        try:
            while True:
                await anyio.sleep(await leadership.bid() or TTL / 3)
                if leadership.epoch:
                    await self._claim.keep(context)
                if leadership.epoch and anyio.current_time() >= next_round:
                    next_round = anyio.current_time() + PRUNE_SECONDS
                    await self.prune(context)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(2):
                await leadership.release()

    async def prune(self, context: ServerContext) -> int:
        """Delete the marks of messages that were settled more than an hour ago: these can never come again."""
        before, count = now_ms() - to_ms(KEPT), 0
        for lane in await self.database.run(lambda each: lanes(each, context.keys.prefix)):
            _, group, topic, partition = lane
            try:
                floor = await settled_floor(context, topic, partition, group, MOST_PARKED)
            except BrokerError as error:
                log.warning("the marks of %s.%d/%s are kept: %s", topic, partition, group, error)
                continue
            if floor is not None:
                found = floor
                count += await self.database.run(lambda each: delete_marks(each, lane, found, before))  # noqa: B023
        return count

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.database!r}>"


class RolledBack(Exception):
    """A transaction was rolled back: its mark could be written, or its call was given up."""


def write_and_roll_back(connection: Connection, mark: Mark) -> None:
    """Raises AlreadyHandled if the mark is there, else RolledBack."""
    write_mark(connection, mark)
    raise RolledBack


def messages_of(work: Message | list[Message] | None, name: str) -> list[Message]:
    """The messages of a call. Raises ConfigError outside of a handler."""
    messages: list[Any] = work if isinstance(work, list) else [work]
    found = [message for message in messages if isinstance(message, Message)]
    if not found:
        raise ConfigError(
            f"{name} works as a dependency of a handler only: write `Annotated[..., Depends({name})]` for one of its "
            f"parameters; elsewhere open a transaction of your own"
        )
    return found
