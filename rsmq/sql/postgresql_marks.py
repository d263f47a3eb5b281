"""Marks on PostgreSQL: the mark and its fence in one statement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import ARRAY, BigInteger, Connection, Text, bindparam, text

from rsmq.model.clock import now_ms
from rsmq.sql.mark import KEY, LANE, SIGNS, Mark
from rsmq.sql.tables import HANDLED

INSERT: Final = f"INSERT INTO rsmq_handled ({', '.join(SIGNS)}, handled_ms)"
MANY_ROWS: Final = """SELECT
        CAST(:deployment AS varchar), CAST(:group_name AS varchar),
        CAST(:topic AS varchar), CAST(:partition_number AS int),
        id_ms, id_seq, run, message_id, CAST(:handled_ms AS bigint)
      FROM unnest(
        CAST(:id_ms AS bigint[]), CAST(:id_seq AS bigint[]), CAST(:run AS bigint[]), CAST(:message_id AS text[])
      ) AS new (id_ms, id_seq, run, message_id)"""
UNLESS_MARKED: Final = f"""ON CONFLICT ({", ".join(KEY)})
      DO UPDATE SET message_id = excluded.message_id, handled_ms = excluded.handled_ms
      WHERE rsmq_handled.message_id <> excluded.message_id"""
FENCE: Final = """SELECT epoch FROM rsmq_fence
      WHERE deployment = :deployment AND group_name = :group_name
      AND topic = :topic AND partition_number = :partition_number AND epoch >= :epoch
      FOR SHARE"""
"""The fence is locked only if it is high enough, so that those who have to raise it do not wait for each other."""

COMMON: Final = (
    *(bindparam(name, type_=HANDLED.c[name].type) for name in LANE),
    bindparam("handled_ms", type_=BigInteger), bindparam("epoch", type_=BigInteger),
)  # fmt: skip
ONE_MARK: Final = text(
    f"""
    {INSERT}
    VALUES (:deployment, :group_name, :topic, :partition_number, :id_ms, :id_seq, :run, :message_id, :handled_ms)
    {UNLESS_MARKED}
    RETURNING ({FENCE})
    """
).bindparams(*COMMON, *(bindparam(name, type_=HANDLED.c[name].type) for name in SIGNS[len(LANE) :]))
"""Writes a mark and reads the fence. No row if the message is marked; NULL if the fence has to be raised."""
MANY_MARKS: Final = text(
    f"""
    WITH mark AS ({INSERT} {MANY_ROWS} {UNLESS_MARKED} RETURNING id_ms, id_seq, run)
    SELECT (
      SELECT CASE WHEN count(*) < :count THEN coalesce(array_agg(concat_ws('-', id_ms, id_seq, run)), '{{}}') END
      FROM mark), ({FENCE})
    """
).bindparams(
    *COMMON, *(bindparam(name, type_=ARRAY(BigInteger)) for name in ("id_ms", "id_seq", "run")),
    bindparam("message_id", type_=ARRAY(Text)), bindparam("count", type_=BigInteger),
)  # fmt: skip
"""The same for many messages of a partition. Returns those that were written if some were not, and NULL if all were."""


def insert_mark(connection: Connection, mark: Mark) -> tuple[bool, int | None]:
    """Write a mark. Returns whether the message was unmarked, and the epoch of its fence: None if it is lower."""
    found = list(connection.execute(ONE_MARK, {**mark.row, "epoch": mark.epoch}))
    return (True, found[0][0]) if found else (False, None)


def insert_marks(connection: Connection, marks: Sequence[Mark]) -> tuple[list[Mark], int | None]:
    """Write marks of one partition. Returns those that were there already, and the epoch as `insert_mark`."""
    first, columns = marks[0], dict(zip(SIGNS, map(list, zip(*marks, strict=True)), strict=False))
    values = {**columns, **first.lane, "epoch": first.epoch, "handled_ms": now_ms()}
    written, epoch = connection.execute(MANY_MARKS, {**values, "count": len(marks)}).one()
    if written is None:  # all of them
        return [], epoch
    new = set(written)
    return [mark for mark in marks if f"{mark.id_ms}-{mark.id_seq}-{mark.run}" not in new], epoch
