"""The marks of handled messages: the statements that make a transaction count once, and only for the newest owner."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from sqlalchemy import Connection, and_, bindparam, delete, func, insert, or_, select, tuple_, update
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.sql.elements import ColumnElement

from rsmq.errors import StaleEpoch
from rsmq.handler.retry import AlreadyHandled
from rsmq.sql.mark import KEY, LANE, SIGNS, Mark
from rsmq.sql.postgresql_marks import insert_mark, insert_marks
from rsmq.sql.tables import FENCE, HANDLED

IN_LANE: Final = itemgetter(*map(Mark._fields.index, LANE))
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
        rows = [mark.signs for mark in marks[at : at + CHUNK]]
        columns = [HANDLED.c[name] for name in SIGNS]
        found.update(map(tuple, connection.execute(select(*columns).where(tuple_(*columns).in_(rows)))))
    return {mark for mark in marks if mark.signs in found}


def write_marks(connection: Connection, marks: Sequence[Mark]) -> dict[Mark, Exception]:
    """The last statements of the transaction of a batch. Returns the messages that must not commit, and why: as
    `write_mark` for each. In one order, so that two transactions do not wait for each other in a circle."""
    refused = dict[Mark, Exception]()
    for _, run in groupby(sorted(marks), IN_LANE):
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
    """Those of one partition, on PostgreSQL."""
    there, epoch = insert_marks(connection, marks)
    try:
        check_fence(connection, marks[0], epoch)
    except StaleEpoch as error:
        return dict.fromkeys(marks, error)
    return {mark: already(mark) for mark in there}


def write_mark(connection: Connection, mark: Mark) -> None:
    """The last statements of a transaction. Raises AlreadyHandled if another one has committed for the message, and
    StaleEpoch if a newer owner of the partition has written. Both locks are held only until the commit that follows."""
    dialect = family(connection)
    if dialect == "postgresql":
        is_new, epoch = insert_mark(connection, mark)
    else:
        is_new = bool(
            connection.execute(SQLITE_MARK, mark.row).rowcount if dialect == "sqlite" else mysql_mark(connection, mark)
        )
        epoch = connection.scalar(EPOCH_LOCKED, parameters({**mark.lane, "epoch": mark.epoch}))
    if not is_new:
        raise already(mark)
    check_fence(connection, mark, epoch)


def already(mark: Mark) -> AlreadyHandled:
    """The error of a message whose mark is there."""
    return AlreadyHandled(f"message {mark.message_id} of {mark.topic}.{mark.partition_number} is handled already")


def raise_fences(connection: Connection, marks: Sequence[Mark]) -> None:
    """Raise the fences of the marks to their epochs, so that no earlier owner commits any more. Raises StaleEpoch."""
    for mark in {IN_LANE(mark): mark for mark in sorted(marks)}.values():
        epoch = connection.scalar(EPOCH_LOCKED, parameters({**mark.lane, "epoch": mark.epoch}))
        check_fence(connection, mark, epoch)


def check_fence(connection: Connection, mark: Mark, epoch: int | None) -> None:
    """Raise the fence of a lane if it is lower: `epoch` is None then. Raises StaleEpoch if it is higher."""
    if epoch is None:
        connection.execute(RAISE[family(connection)], {**mark.lane, "epoch": mark.epoch})
        epoch = connection.scalar(EPOCH, parameters(mark.lane))
    if mark.epoch and epoch != mark.epoch:
        raise StaleEpoch(
            f"{mark.topic}.{mark.partition_number}/{mark.group_name} has a newer owner, whose epoch {epoch} is in "
            f"rsmq_fence: what this handler wrote under epoch {mark.epoch} is rolled back",
            epoch or 0,
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


def lanes(connection: Connection, deployment: str) -> list[tuple[str, str, str, int]]:
    """Deployment, group, topic and partition of the marks of a deployment: each has a fence."""
    columns = [FENCE.c[name] for name in LANE]
    found = connection.execute(select(*columns).where(FENCE.c.deployment == deployment))
    return [(own, group, topic, partition) for own, group, topic, partition in found]


def delete_marks(
    connection: Connection, lane: tuple[str, str, str, int], floor: tuple[int, int], before_ms: int
) -> int:
    """Delete the marks of a lane below a stream id that were made before a moment; returns how many."""
    ms, seq = floor
    old = (
        HANDLED.c.id_ms < before_ms,  # a bound of the index: nothing is handled before it is published
        HANDLED.c.handled_ms < before_ms,
        or_(HANDLED.c.id_ms < ms, and_(HANDLED.c.id_ms == ms, HANDLED.c.id_seq < seq)),
    )
    of_lane = (HANDLED.c[name] == value for name, value in zip(LANE, lane, strict=True))
    return int(connection.execute(delete(HANDLED).where(*of_lane, *old)).rowcount)
