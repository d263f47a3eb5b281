"""Marks that travel with COMMIT, in one round trip: on PostgreSQL with asyncpg, where nothing unusual is expected.

The marks are rows of the table as always, but their statement does not look first. It fails if a message is marked, or
if the fence is not at the epoch of the message. Then the server does not reach COMMIT, and nothing is committed. What
was the reason is found out by the statements of `marks`, in a transaction of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final
from zlib import crc32

from sqlalchemy import Connection

from rsmq.model.clock import now_ms
from rsmq.model.message import Message
from rsmq.sql.mark import SIGNS, LaneRun, mark_id_of
from rsmq.sql.tables import LONGEST_ID

INSERT: Final = f"INSERT INTO rsmq_handled ({', '.join(SIGNS)}, handled_ms)"
FENCE: Final = (
    "SELECT '1' FROM rsmq_fence WHERE group_name = $1 AND topic = $2 AND partition_number = $3 AND epoch = $9"
)
LOW_OR_HIGH: Final = "not at this epoch in rsmq_fence"
"""No number, so PostgreSQL refuses to cast it to one. Its error has this text."""
FENCES: Final = """fence AS MATERIALIZED (
    SELECT 1 FROM rsmq_fence JOIN unnest($9, $10) AS own (number, at) ON partition_number = number AND epoch = at
    WHERE group_name = $1 AND topic = $2 ORDER BY partition_number FOR SHARE OF rsmq_fence
)"""
RUN: Final = "(SELECT $6 FROM fence HAVING count(*) = cardinality($9))"
"""The run, or NULL, which the column refuses, if a fence is at another epoch. The locks hold until the commit."""


class Prepared:
    """A statement that is prepared once for each connection: PostgreSQL then only parses its values."""

    def __init__(self, types: str, statement: str) -> None:
        self.name = f"rsmq_marks_{crc32((types + statement).encode()):08x}"  # the same name is the same statement
        self.prepare = f"PREPARE {self.name} ({types}) AS {statement}"


ONE: Final = Prepared(
    "varchar, varchar, int, bigint, bigint, bigint, varchar, bigint, bigint",
    f"{INSERT} VALUES ($1, $2, $3, $4, $5, $6, $7, $8) "
    f"RETURNING CAST(coalesce(({FENCE} FOR SHARE), '{LOW_OR_HIGH}') AS int)",
)
"""The lock of the fence comes after the mark, as in `marks`, and holds until the commit."""
MANY: Final = Prepared(
    "varchar, varchar, int[], bigint[], bigint[], bigint, varchar[], bigint, int[], bigint[]",
    f"WITH {FENCES} {INSERT} SELECT $1, $2, unnest($3), unnest($4), unnest($5), {RUN}, unnest($7), $8",
)
UNSAFE: Final = re.compile("[\"'\\\\\0]")
"""What needs more care in a literal than two quotes around it."""
REFUSED: Final = {"23505", "23502", "22P02"}
"""A unique key, NULL, and what is no number."""
UNPREPARED: Final = {"26000", "42P05"}
"""The statement is not there, or is there already: each transaction has another connection, as with PgBouncer."""


def one_mark(message: Message, own: LaneRun) -> str | None:
    """The statement that marks a message. None if its id cannot stand in it as it is."""
    ms, seq, message_id = mark_id_of(message)
    if UNSAFE.search(message_id):
        return None
    return (
        f"EXECUTE {ONE.name}('{own.group_name}', '{own.topic}', {own.partition_number}, {ms}, {seq}, {own.run}, "
        f"'{message_id}', {now_ms()}, {own.epoch})"
    )


def many_marks(messages: Sequence[Message], lane_runs: Sequence[LaneRun], lanes: Sequence[LaneRun]) -> str | None:
    """The statement that marks the messages of a batch. `lanes`: the different ones among `lane_runs`, sorted: in the
    order of `write_marks`, so that two transactions do not wait for each other in a circle. None if it cannot be one
    statement, or as `one_mark`."""
    group, topic, _, run, _ = lanes[0]
    ids = [message.id[:LONGEST_ID] for message in messages]
    if len({(own.lane[:2], own.run) for own in lanes}) > 1 or UNSAFE.search("".join(ids)):
        return None
    numbers = b"-".join([message.entry_id for message in messages]).split(b"-")  # one by one costs twice as much
    rows = sorted(zip([own[2] for own in lane_runs], map(int, numbers[::2]), map(int, numbers[1::2]), ids, strict=True))
    partitions, ms, seqs, ids = map(list, zip(*rows, strict=True))
    own_epochs = f"{array(own.partition_number for own in lanes)}, {array(own.epoch for own in lanes)}"
    return (
        f"EXECUTE {MANY.name}('{group}', '{topic}', {array(partitions)}, {array(ms)}, {array(seqs)}, {run}, "
        f"{array(ids)}, {now_ms()}, {own_epochs})"
    )


def array(values: Iterable[str | int]) -> str:
    """An array as text: PostgreSQL reads it faster than asyncpg writes one."""
    return "'{\"" + '","'.join(map(str, values)) + "\"}'"


class MarkedCommit:
    """Stands in for asyncpg's transaction until it ends: what SQLAlchemy takes for the commit sends the marks, too."""

    def __init__(self, connection: Connection, prepared: Prepared, marks: str) -> None:
        driver: Any = connection.connection.dbapi_connection
        self._own = driver.driver_connection
        self._begun = driver._transaction
        self._info = connection.info
        self._prepared = prepared
        self._marks = marks
        self.is_refused = False
        self.is_unprepared = False
        driver._transaction = self

    async def commit(self) -> None:
        """Marks and COMMIT. If one of them fails, the transaction is over all the same, as SQLAlchemy expects."""
        try:
            if self._prepared.name not in self._info:
                await self._own.execute(self._prepared.prepare)
                self._info[self._prepared.name] = True
            await self._own.execute(f"{self._marks};COMMIT")
        except Exception as error:
            state = getattr(error, "sqlstate", None)
            self.is_unprepared = state in UNPREPARED
            is_own = getattr(error, "table_name", "") == "rsmq_handled" or LOW_OR_HIGH in str(error)
            self.is_refused = state in REFUSED and is_own
            if not self._own.is_closed() and self._own.is_in_transaction():
                with suppress(Exception):  # of the two errors the first one tells why
                    await self._begun.rollback()
            raise
        finally:
            self._own._top_xact = None  # asyncpg's own note that a transaction is open

    async def rollback(self) -> None:
        """Begin and commit as asyncpg does."""
        await self._begun.rollback()


def can_join(connection: Connection) -> bool:
    """Whether the driver is asyncpg, in a transaction, and keeps it where MarkedCommit looks for it."""
    if connection.dialect.driver != "asyncpg":
        return False
    driver: Any = connection.connection.dbapi_connection
    own, begun = driver.driver_connection, getattr(driver, "_transaction", None)
    return begun is not None and hasattr(type(own), "_top_xact") and own._top_xact is begun


class KnownLanes:
    """Partitions on whose fence this process has written: the next messages of these need no look before."""

    def __init__(self) -> None:
        self._epochs = dict[tuple[str, str, int], int]()
        self._careful = dict[tuple[str, str, int], int]()

    def are_known(self, lane_runs: Iterable[LaneRun]) -> bool:
        """Whether the fences of all of them were at these epochs."""
        return all(own.epoch and self._epochs.get(own.lane) == own.epoch for own in lane_runs)

    def learn(self, lane_runs: Iterable[LaneRun]) -> None:
        """Their transaction has committed."""
        for own in lane_runs:
            if self._careful.get(own.lane) != own.epoch:
                self._epochs[own.lane] = own.epoch

    def doubt(self, lane_runs: Iterable[LaneRun]) -> None:
        """Something is unusual there: look before, until there is a newer epoch."""
        for own in lane_runs:
            self._epochs.pop(own.lane, None)
            self._careful[own.lane] = own.epoch
