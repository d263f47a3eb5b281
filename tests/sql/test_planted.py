"""A row that a database refuses is in no error: neither in its text, nor in the traceback of what it came from.

PostgreSQL says it in the detail of a violated constraint, MariaDB the part of a text that its character set lacks.
"""

from __future__ import annotations

from typing import Final

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from rsmq import RsmqError
from rsmq.sql import Outbox
from tests.security.test_planted import MARK, leaks, said

ROW: Final = {"headers": {"token": f"{MARK}-header"}}
TIGHT: Final = "alter table rsmq_outbox add constraint tight check (char_length(aggregatetype) < 2)"
TRIGGER: Final = """
create trigger tight before insert on rsmq_outbox when length(new.aggregatetype) > 1
begin select raise(abort, 'tight'); end
"""


def tight(connection: Connection) -> None:
    """From now on no row is taken: as with a constraint that was added."""
    connection.execute(text(TRIGGER if connection.dialect.name == "sqlite" else TIGHT))


async def test_no_error_of_an_async_database_shows_a_row(engine: AsyncEngine) -> None:
    """Of each driver, for a table that lacks a column."""
    async with engine.begin() as connection:
        await connection.execute(text("alter table rsmq_outbox drop column enc"))
    async with engine.connect() as connection:
        with pytest.raises((RsmqError, DBAPIError)) as caught:
            await Outbox(engine, prefix="p").publish(connection, "orders", {MARK: MARK}, headers={"token": MARK})
    assert "rsmq_outbox" in said(caught.value)
    assert leaks(said(caught.value)) == []


def test_no_error_of_a_database_shows_a_row(sync_engine: Engine) -> None:
    """The same in a thread."""
    with sync_engine.begin() as connection:
        connection.execute(text("alter table rsmq_outbox drop column enc"))
    with sync_engine.connect() as connection, pytest.raises((RsmqError, DBAPIError)) as caught:
        Outbox(sync_engine, prefix="p").publish(connection, "orders", {MARK: MARK}, headers={"token": MARK})
    assert "rsmq_outbox" in said(caught.value)
    assert leaks(said(caught.value)) == []


async def test_no_error_of_an_async_database_shows_a_row_that_a_constraint_refuses(engine: AsyncEngine) -> None:
    """One row, and one of many."""
    outbox = Outbox(engine, prefix="p")
    async with engine.begin() as connection:
        await connection.run_sync(tight)
    for publish in (
        lambda place: outbox.publish(place, "orders", {MARK: MARK}, key=f"{MARK}-key", **ROW),
        lambda place: outbox.publish_many(place, "orders", [{MARK: MARK}, {MARK: 2}], **ROW),
    ):
        async with engine.connect() as connection:
            with pytest.raises(DBAPIError) as caught:
                await publish(connection)
        assert "tight" in said(caught.value)
        assert leaks(said(caught.value)) == []


def test_no_error_of_a_database_shows_a_row_that_a_constraint_refuses(sync_engine: Engine) -> None:
    """The same in a thread."""
    outbox = Outbox(sync_engine, prefix="p")
    with sync_engine.begin() as connection:
        tight(connection)
    for publish in (
        lambda place: outbox.publish(place, "orders", {MARK: MARK}, key=f"{MARK}-key", **ROW),
        lambda place: outbox.publish_many(place, "orders", [{MARK: MARK}, {MARK: 2}], **ROW),
    ):
        with sync_engine.connect() as connection, pytest.raises(DBAPIError) as caught:
            publish(connection)
        assert "tight" in said(caught.value)
        assert leaks(said(caught.value)) == []


@pytest.mark.parametrize("sync_engine", ["pymysql"], indirect=True)
def test_no_error_of_mariadb_shows_the_part_of_a_text_that_it_has_no_letters_for(sync_engine: Engine) -> None:
    """A header in a column with an older character set."""
    with sync_engine.begin() as connection:
        connection.execute(text("alter table rsmq_outbox modify headers text character set latin1"))
    with sync_engine.connect() as connection, pytest.raises(DBAPIError) as caught:
        Outbox(sync_engine, prefix="p").publish(connection, "orders", 1, headers={"token": f"\U0001f511{MARK}"})
    assert "headers" in said(caught.value)
    assert "1366" in said(caught.value)
    assert "xF0" not in said(caught.value)
    assert leaks(said(caught.value)) == []
