"""The marks of handled messages: the statements that make a transaction count once, and only for the newest owner."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Connection,
    Text,
    and_,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.sql.elements import ColumnElement

from rsmq.errors import StaleEpoch
from rsmq.handler.retry import AlreadyHandled
from rsmq.model.clock import now_ms
from rsmq.model.message import Message
from rsmq.model.stream_id import parse_stream_id
from rsmq.sql.database import missing_table
from rsmq.sql.tables import FENCE, HANDLED, LONGEST_ID


@dataclass(frozen=True, slots=True)
class Mark:
    """One message in one run of its group, and the epoch under which it is handled."""

    group_name: str
    topic: str
    partition_number: int
    id_ms: int
    id_seq: int
    run: int
    message_id: str
    epoch: int

    @classmethod
    def of(cls, message: Message) -> Mark:
        """The mark of a message."""
        ms, seq = parse_stream_id(message.entry_id)
        place = message.group, message.topic, message.partition
        return cls(*place, ms, seq, message.run, message.id[:LONGEST_ID], message.fence)

    @property
    def lane(self) -> dict[str, Any]:
        """Group, topic and partition."""
        return {"group_name": self.group_name, "topic": self.topic, "partition_number": self.partition_number}

    @property
    def row(self) -> dict[str, Any]:
        """The row of the table."""
        return {
            **self.lane, "id_ms": self.id_ms, "id_seq": self.id_seq, "run": self.run, "message_id": self.message_id,
            "handled_ms": now_ms(),
        }  # fmt: skip


LANE: Final = ("group_name", "topic", "partition_number")
KEY: Final = (*LANE, "id_ms", "id_seq", "run")
SIGNS: Final = (*KEY, "message_id")
IN_LANE: Final = attrgetter(*LANE)
ORDER: Final = attrgetter(*KEY)
KEPT: Final = timedelta(hours=1)
"""For how long a mark is kept after its message is settled: a failover may undo the last settles."""
CHUNK: Final = 1000
"""Marks in one statement: databases limit the number of parameters."""


def matches(table: Any, names: tuple[str, ...]) -> ColumnElement[bool]:
    """The columns are equal to the parameters of the same names."""
    return and_(*(table.c[name] == bindparam(f"p_{name}", type_=table.c[name].type) for name in names))


def parameters(values: dict[str, Any]) -> dict[str, Any]:
    """Values for `matches`."""
    return {f"p_{name}": value for name, value in values.items()}


def upserted(dialect: Any) -> Any:
    """Insert the mark, or take over the row of another message with the same stream id; no row if it is that."""
    new = dialect.insert(HANDLED)
    values = {"message_id": new.excluded.message_id, "handled_ms": new.excluded.handled_ms}
    differs = HANDLED.c.message_id != new.excluded.message_id
    return new.on_conflict_do_update(index_elements=list(KEY), set_=values, where=differs)


def raised(dialect: Any) -> Any:
    """Raise the fence to a higher epoch."""
    new = dialect.insert(FENCE)
    higher = FENCE.c.epoch < new.excluded.epoch
    return new.on_conflict_do_update(index_elements=list(LANE), set_={"epoch": new.excluded.epoch}, where=higher)


MARK_AND_FENCE: Final = text(
    """
    WITH mark AS (
      INSERT INTO rsmq_handled (group_name, topic, partition_number, id_ms, id_seq, run, message_id, handled_ms)
      VALUES (:group_name, :topic, :partition_number, :id_ms, :id_seq, :run, :message_id, :handled_ms)
      ON CONFLICT (group_name, topic, partition_number, id_ms, id_seq, run)
      DO UPDATE SET message_id = excluded.message_id, handled_ms = excluded.handled_ms
      WHERE rsmq_handled.message_id <> excluded.message_id
      RETURNING 1)
    SELECT (SELECT count(*) FROM mark), (
      SELECT epoch FROM rsmq_fence
      WHERE group_name = :group_name AND topic = :topic AND partition_number = :partition_number AND epoch >= :epoch
      FOR SHARE)
    """
).bindparams(
    *(bindparam(name, type_=HANDLED.c[name].type) for name in (*LANE, "id_ms", "id_seq", "run", "message_id")),
    bindparam("handled_ms", type_=BigInteger), bindparam("epoch", type_=BigInteger),
)  # fmt: skip
"""PostgreSQL: write the mark and read the fence at once. The fence is locked only if it is high enough, so that those
who have to raise it do not wait for each other."""
MARKS_AND_FENCE: Final = text(
    """
    WITH mark AS (
      INSERT INTO rsmq_handled (group_name, topic, partition_number, id_ms, id_seq, run, message_id, handled_ms)
      SELECT :group_name, :topic, :partition_number, id_ms, id_seq, run, message_id, :handled_ms
      FROM unnest(:id_mss, :id_seqs, :runs, :message_ids) new (id_ms, id_seq, run, message_id)
      ON CONFLICT (group_name, topic, partition_number, id_ms, id_seq, run)
      DO UPDATE SET message_id = excluded.message_id, handled_ms = excluded.handled_ms
      WHERE rsmq_handled.message_id <> excluded.message_id
      RETURNING id_ms, id_seq, run)
    SELECT (
      SELECT CASE WHEN count(*) < :count THEN coalesce(array_agg(concat_ws('-', id_ms, id_seq, run)), '{}') END
      FROM mark), (
      SELECT epoch FROM rsmq_fence
      WHERE group_name = :group_name AND topic = :topic AND partition_number = :partition_number AND epoch >= :epoch
      FOR SHARE)
    """
).bindparams(
    *(bindparam(name, type_=HANDLED.c[name].type) for name in LANE),
    *(bindparam(f"{name}s", type_=ARRAY(BigInteger)) for name in ("id_ms", "id_seq", "run")),
    bindparam("message_ids", type_=ARRAY(Text)), bindparam("count", type_=BigInteger),
    bindparam("handled_ms", type_=BigInteger), bindparam("epoch", type_=BigInteger),
)  # fmt: skip
"""The same for many messages of a partition. Returns those that were written if some were not, and NULL if all were."""
PARAMETERS: Final = (*SIGNS, "handled_ms", "epoch")
DIRECT: Final = re.sub(r":(\w+)", lambda found: f"${PARAMETERS.index(found[1]) + 1}", MARK_AND_FENCE.text)
"""MARK_AND_FENCE with the parameters of asyncpg."""
SQLITE_MARK: Final = upserted(sqlite)
MYSQL_MARK: Final = insert(HANDLED).prefix_with("IGNORE")
TAKE_OVER: Final = (
    update(HANDLED)
    .where(matches(HANDLED, KEY), HANDLED.c.message_id != bindparam("new_id"))
    .values(message_id=bindparam("new_id"), handled_ms=bindparam("new_ms"))
)
EPOCH: Final = select(FENCE.c.epoch).where(matches(FENCE, LANE))
EPOCH_LOCKED: Final = EPOCH.where(FENCE.c.epoch >= bindparam("p_epoch")).with_for_update(read=True)
MYSQL_NEW_FENCE: Final = mysql.insert(FENCE)
MYSQL_FENCE: Final = MYSQL_NEW_FENCE.on_duplicate_key_update(
    epoch=func.greatest(FENCE.c.epoch, MYSQL_NEW_FENCE.inserted.epoch)
)
RAISE: Final = {"postgresql": raised(postgresql), "sqlite": raised(sqlite), "mysql": MYSQL_FENCE}


def handled_of(connection: Connection, marks: Sequence[Mark]) -> set[Mark]:
    """Those of the marks whose messages an earlier run has committed."""
    found = set[tuple[Any, ...]]()
    for at in range(0, len(marks), CHUNK):
        rows = [tuple(mark.row[name] for name in SIGNS) for mark in marks[at : at + CHUNK]]
        columns = [HANDLED.c[name] for name in SIGNS]
        found.update(map(tuple, connection.execute(select(*columns).where(tuple_(*columns).in_(rows)))))
    return {mark for mark in marks if tuple(mark.row[name] for name in SIGNS) in found}


def write_marks(connection: Connection, marks: Sequence[Mark]) -> dict[Mark, Exception]:
    """The last statements of the transaction of a batch. Returns the messages that must not commit, and why: as
    `write_mark` for each. In one order, so that two transactions do not wait for each other in a circle."""
    refused = dict[Mark, Exception]()
    for _, run in groupby(sorted(marks, key=ORDER), IN_LANE):
        of_lane = list(run)
        if family(connection) == "postgresql":
            refused.update(write_lane(connection, of_lane))
            continue
        for mark in of_lane:
            try:
                write_mark(connection, mark)
            except (AlreadyHandled, StaleEpoch) as error:
                refused[mark] = error
    return refused


def write_lane(connection: Connection, marks: Sequence[Mark]) -> dict[Mark, Exception]:
    """Those of one partition, on PostgreSQL, in one statement."""
    first = marks[0]
    columns = {f"{name}s": [getattr(mark, name) for mark in marks] for name in ("id_ms", "id_seq", "run", "message_id")}
    values = {**first.lane, **columns, "count": len(marks), "handled_ms": now_ms(), "epoch": first.epoch}
    written, epoch = connection.execute(MARKS_AND_FENCE, values).one()
    refused = dict[Mark, Exception]()
    if written is not None:  # not all of them
        there = set(written)
        refused = {mark: already(mark) for mark in marks if f"{mark.id_ms}-{mark.id_seq}-{mark.run}" not in there}
    try:
        check_fence(connection, first, epoch)
    except StaleEpoch as error:
        refused = dict.fromkeys(marks, error)
    return refused


def write_mark(connection: Connection, mark: Mark) -> None:
    """The last statements of a transaction. Raises AlreadyHandled if another one has committed for the message, and
    StaleEpoch if a newer owner of the partition has written. Both locks are held only until the commit that follows."""
    dialect = family(connection)
    if dialect == "postgresql":
        values = {**mark.row, "epoch": mark.epoch}
        written, epoch = directly(connection, values) or connection.execute(MARK_AND_FENCE, values).one()
    else:
        written = (
            connection.execute(SQLITE_MARK, mark.row).rowcount if dialect == "sqlite" else mysql_mark(connection, mark)
        )
        epoch = connection.scalar(EPOCH_LOCKED, parameters({**mark.lane, "epoch": mark.epoch}))
    check_mark(connection, mark, written, epoch)


def directly(connection: Connection, values: dict[str, Any]) -> tuple[int, int | None] | None:
    """What `MARK_AND_FENCE` returns, on asyncpg's own connection, for half of the worker's CPU. None for other drivers,
    and if the transaction has not begun yet, so that the statement would commit by itself."""
    if connection.dialect.driver != "asyncpg":
        return None
    driver: Any = connection.connection.dbapi_connection
    if not driver.driver_connection.is_in_transaction():
        return None
    try:
        written, epoch = driver.run_async(lambda own: own.fetchrow(DIRECT, *(values[name] for name in PARAMETERS)))
    except Exception as error:
        raise missing_table(str(error)) or error from error
    return written, epoch


def check_mark(connection: Connection, mark: Mark, written: int, epoch: int | None) -> None:
    """The rest of `write_mark`: raises AlreadyHandled or StaleEpoch."""
    if not written:
        raise already(mark)
    check_fence(connection, mark, epoch)


def already(mark: Mark) -> AlreadyHandled:
    """The error of a message whose mark is there."""
    return AlreadyHandled(f"message {mark.message_id} of {mark.topic}.{mark.partition_number} is handled already")


def check_fence(connection: Connection, mark: Mark, epoch: int | None) -> None:
    """Raise the fence of a lane if it is lower: `epoch` is None then. Raises StaleEpoch if it is higher."""
    if epoch is None:
        connection.execute(RAISE[family(connection)], {**mark.lane, "epoch": mark.epoch})
        epoch = connection.scalar(EPOCH, parameters(mark.lane))
    if mark.epoch and epoch != mark.epoch:
        raise StaleEpoch(
            f"{mark.topic}.{mark.partition_number}/{mark.group_name} has a newer owner, whose epoch {epoch} is in "
            f"rsmq_fence: what this handler wrote under epoch {mark.epoch} is rolled back"
        )


def mysql_mark(connection: Connection, mark: Mark) -> int:
    """Insert the mark, or take over the row of another message with the same stream id; 0 if it is the same one."""
    if connection.execute(MYSQL_MARK, mark.row).rowcount:
        return 1
    values = {**parameters(mark.row), "new_id": mark.message_id, "new_ms": mark.row["handled_ms"]}
    return connection.execute(TAKE_OVER, values).rowcount


def family(connection: Connection) -> str:
    """`postgresql`, `sqlite` or `mysql`, which MariaDB is, too."""
    name = connection.dialect.name
    return "mysql" if name == "mariadb" else name


def lanes(connection: Connection) -> list[tuple[str, str, int]]:
    """Group, topic and partition of all marks: each has a fence, which is 0 in shared distribution."""
    found = connection.execute(select(*(FENCE.c[name] for name in LANE)))
    return [(group, topic, partition) for group, topic, partition in found]


def delete_marks(connection: Connection, lane: tuple[str, str, int], floor: tuple[int, int], before_ms: int) -> int:
    """Delete the marks of a lane below a stream id that were made before a moment; returns how many."""
    ms, seq = floor
    old = (
        HANDLED.c.id_ms < before_ms,  # a bound of the index: nothing is handled before it is published
        HANDLED.c.handled_ms < before_ms,
        or_(HANDLED.c.id_ms < ms, and_(HANDLED.c.id_ms == ms, HANDLED.c.id_seq < seq)),
    )
    of_lane = (HANDLED.c[name] == value for name, value in zip(LANE, lane, strict=True))
    return int(connection.execute(delete(HANDLED).where(*of_lane, *old)).rowcount)
