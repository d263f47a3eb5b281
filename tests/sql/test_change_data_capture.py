"""Debezium can read the outbox instead of the relay: what its connector sees of a row, by PostgreSQL's own protocol."""

from __future__ import annotations

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from rsmq.sql import Outbox, create_tables
from tests.sql.databases import Postgres

ROUTER = ["id", "aggregatetype", "aggregateid", "type", "payload"]
"""The columns that the outbox event router of Debezium reads by default."""


def test_change_data_capture_sees_a_row_with_the_columns_of_debeziums_router() -> None:
    """Debezium's connector reads this stream (pgoutput): the row is there when the transaction has committed."""
    with Postgres("wal_level = logical") as postgres:
        engine = create_engine(postgres.url("psycopg", postgres.new_database()), poolclass=NullPool)
        with engine.begin() as connection:
            create_tables(connection)
            connection.execute(text("CREATE PUBLICATION outbox FOR TABLE rsmq_outbox"))
        with engine.begin() as connection:
            connection.execute(text("SELECT pg_create_logical_replication_slot('debezium', 'pgoutput')"))
        with Session(engine) as session:
            Outbox(engine).publish(session, "lost", {"n": 1})
            session.rollback()
            message_id = Outbox(engine).publish(session, "orders", {"n": 2}, key="ada")
            session.commit()
        with engine.begin() as connection:
            changes = connection.scalars(
                text(
                    "SELECT data FROM pg_logical_slot_get_binary_changes('debezium', NULL, NULL, "
                    "'proto_version', '1', 'publication_names', 'outbox')"
                )
            ).all()
        engine.dispose()
    [relation] = [each for each in changes if each[:1] == b"R"]
    positions = [relation.find(b"\0" + name.encode() + b"\0") for name in ROUTER]
    assert -1 not in positions
    assert positions == sorted(positions), "in this order"
    [row] = [each for each in changes if each[:1] == b"I"]
    assert all(part in row for part in (message_id.encode(), b"orders", b"ada", b"application/json"))
    assert b'{"n":2}'.hex().encode() in row, "the payload, as bytes in hexadecimal"
