"""The rows that wait in an outbox."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, func, select, true

from rsmq.model.encoding import key_of
from rsmq.sql.tables import OUTBOX


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """`backlog` rows wait, the oldest for `age_seconds`; `refused` rows cannot be published (column `error`)."""

    backlog: int
    age_seconds: float
    refused: int
    error: str | None


def read_status(connection: Connection, deployment: str | None = None) -> OutboxStatus:
    """Count the rows in the outbox, by the clock of the database: of one deployment, or of all that share the database.

    Rows of a prefix that no worker has show only in the count of all.
    """
    ours = true() if deployment is None else OUTBOX.c.deployment == deployment
    waits = OUTBOX.c.error.is_(None)
    backlog, oldest, now = connection.execute(
        select(func.count(), func.min(OUTBOX.c.created_at), func.current_timestamp()).where(ours, waits)
    ).one()
    refused, error = connection.execute(select(func.count(), func.max(OUTBOX.c.error)).where(ours, ~waits)).one()
    age = 0.0 if oldest is None else max(0.0, (as_utc(now) - as_utc(oldest)).total_seconds())
    return OutboxStatus(backlog, age, refused, error)


def read_keys(connection: Connection, topic: str) -> dict[str, int]:
    """How many rows of a topic need which key; an empty id for those that are not encrypted."""
    found = Counter[str]()
    for enc, number in connection.execute(
        select(OUTBOX.c.enc, func.count()).where(OUTBOX.c.aggregatetype == topic).group_by(OUTBOX.c.enc)
    ):
        found[key_of(str(enc or "").encode())] += number
    return dict(found)


def read_strangers(connection: Connection, deployment: str) -> dict[str, tuple[int, float]]:
    """The rows that wait for workers of other deployments: of each prefix, how many, and for how many seconds."""
    found = connection.execute(
        select(OUTBOX.c.deployment, func.count(), func.min(OUTBOX.c.created_at), func.current_timestamp())
        .where(OUTBOX.c.deployment != deployment, OUTBOX.c.error.is_(None))
        .group_by(OUTBOX.c.deployment)
    )
    return {
        prefix: (count, max(0.0, (as_utc(now) - as_utc(oldest)).total_seconds()))
        for prefix, count, oldest, now in found
    }


def as_utc(moment: datetime | str) -> datetime:
    """A time of the database: SQLite has text, and most have no time zone."""
    found = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
