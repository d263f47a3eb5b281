"""Services: work that each worker of a broker runs beside its handlers, such as the relay of an outbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, runtime_checkable

from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.message import Message


@runtime_checkable
class Service(Protocol):
    """An object that `broker.include` takes, or whose method is a dependency of a handler.

    Each worker runs `serve` in a task, with the `ServerContext` of its connection, and cancels it when it stops. After
    an error it is called again.
    """

    async def serve(self, context: Any) -> None: ...


OnRow = Callable[[Mapping[str, Any]], None]
"""Gets the topic (`aggregatetype`), key (`aggregateid`), id, payload, type and headers of a row."""


@runtime_checkable
class Belongs(Service, Protocol):
    """A service that keeps rows outside of the server, of one deployment: the prefix of a broker."""

    def belong_to(self, prefix: str, encoding: Encoding = NO_CODECS) -> None:
        """Before it serves, or is used: `encoding` compresses and encrypts what it keeps. Raises ConfigError if it
        belongs to another one."""
        ...

    def lent_to(self, prefix: str, on_row: OnRow) -> AbstractContextManager[None]:
        """It belongs to another prefix inside the block, for tests. `on_row` is called with each row that is made."""
        ...

    async def rows_left(self) -> int:
        """How many of its rows have yet to be published."""
        ...

    async def remove_rows(self) -> None:
        """Delete all rows of its prefix: a test has ended."""
        ...


@runtime_checkable
class ClaimsDatabase(Service, Protocol):
    """A service that keeps, outside of the server, what belongs to one server and prefix."""

    async def claim(self, context: Any) -> None:
        """Before handlers run, with the `ServerContext`. Raises OtherServer if another server uses it under the same
        prefix, and other errors while that cannot be asked."""
        ...


@runtime_checkable
class Commits(Service, Protocol):
    """A service whose dependency commits a transaction for each call of the handler."""

    _commits: Literal[True]

    async def committed(self, messages: Sequence[Message]) -> list[bool]:
        """Whether the effects of each message are committed, by this attempt or an earlier one.

        Final for those that are not: what still runs of an attempt commits no more. Raises StaleEpoch if the partition
        has a newer owner, and other errors while the database has no answer.
        """
        ...
