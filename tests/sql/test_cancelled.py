"""What is cancelled in the middle of a transaction leaves no lock behind."""

import sqlite3
from pathlib import Path

import anyio
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from rsmq.sql.database import Database

NUMBERS = text(
    "INSERT INTO numbers WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 5000) SELECT n FROM r"
)


async def test_a_query_that_is_cancelled_half_way_does_not_lock_the_file(tmp_path: Path) -> None:
    """Else nothing can be written until Python collects the cursor (before: 3 of 200 cancellations, for over 1 s)."""
    file = tmp_path / "test.db"
    database = Database(create_async_engine(f"sqlite+aiosqlite:///{file}"), "Outbox")
    await database.run(lambda connection: connection.execute(text("CREATE TABLE numbers (n int)")))
    await database.run(lambda connection: connection.execute(NUMBERS))
    queries = 0

    async def read_again_and_again() -> None:
        nonlocal queries
        while True:
            await database.run(lambda connection: connection.execute(text("SELECT * FROM numbers")).all())
            queries += 1

    for number in range(40):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read_again_and_again)
            await anyio.sleep(0.005 + number % 20 * 0.0005)
            tasks.cancel_scope.cancel()
        with sqlite3.connect(file, timeout=0) as other:  # raises when anything holds a lock
            other.execute("DELETE FROM numbers WHERE n = -1")
        other.close()
    await database.close()
    assert queries
