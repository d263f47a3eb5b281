"""A row that a database refuses is in no error: neither in its text, nor in the traceback of what it came from."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from rsmq import RsmqError
from rsmq.sql import Outbox
from tests.security.test_planted import MARK, leaks, said


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
