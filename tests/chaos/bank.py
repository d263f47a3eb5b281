"""The bank of the chaos suite: what handlers write to a database and send by an outbox, under every fault.

Each message moves money between two accounts: two rows of a table, in the transaction of `Effects`, and a receipt
through the outbox. The table has no unique constraint, so that it shows what counted twice.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from fast_depends import Depends
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from rsmq import Broker, BrokerError, ConfigError
from rsmq.sql import Effects, Outbox, create_tables
from tests.chaos.checker import History, Name
from tests.sql.databases import Postgres

RECEIPTS = "bank-receipts"
POST = text("INSERT INTO posting VALUES (:key, :n, 'from', :less), (:key, :n, 'to', :more)")
AGAIN = ("the group was reset", "the group was destroyed", "its deduplication key was deleted")
"""Reasons of a history for which a message is handled again on purpose, or is there twice."""


class Till:
    """Books the messages of one worker. `is_plain`: in a transaction of its own, the control."""

    def __init__(self, broker: Broker, url: str, *, is_plain: bool) -> None:
        self._broker, self._is_plain = broker, is_plain
        self.engine = create_async_engine(url, pool_size=32)
        self._sessions = async_sessionmaker(self.engine)
        self._effects, self._outbox = Effects(self._sessions), Outbox(self.engine)
        if not is_plain:
            broker.include(self._outbox)

    @property
    def dependency(self) -> Any:
        """The session of a handler, or None for the control."""
        return Depends(no_session if self._is_plain else self._effects.session)

    async def book(self, session: AsyncSession | None, key: str, n: int) -> None:
        """The work of a message."""
        if session is not None:
            await session.execute(POST, {"key": key, "n": n, "less": -n - 1, "more": n + 1})
            await self._outbox.publish(session, RECEIPTS, {"key": key, "n": n}, key=key)
            return
        async with self._sessions.begin() as own:
            await own.execute(POST, {"key": key, "n": n, "less": -n - 1, "more": n + 1})
        await self._broker.publish(RECEIPTS, {"key": key, "n": n}, key=key)


def no_session() -> None:
    """That of the control."""


class Bank:
    """A PostgreSQL for the runs of a testbed, each with a database of its own."""

    def __init__(self) -> None:
        self._postgres = Postgres().__enter__()

    def close(self) -> None:
        """End it."""
        self._postgres.__exit__()

    def open(self) -> str:
        """A new database with the tables; returns its address for asyncpg."""
        name = self._postgres.new_database()
        engine = create_engine(self._postgres.url("psycopg", name))
        with engine.begin() as connection:
            create_tables(connection)
            connection.execute(text("CREATE TABLE posting (key text, n bigint, account text, amount bigint)"))
        engine.dispose()
        return self._postgres.url("asyncpg", name).render_as_string(hide_password=False)


def bookings(url: str) -> tuple[Counter[Name], list[str], dict[str, Name]]:
    """How often each message was booked, what does not add up, and the receipts that wait in the outbox."""
    engine = create_engine(url.replace("+asyncpg", "+psycopg"))
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT key, n, count(*), sum(amount) FROM posting GROUP BY key, n")).all()
        waiting = connection.execute(text("SELECT id, payload FROM rsmq_outbox")).all()
    engine.dispose()
    wrong = [f"{key}/{n} is booked by half" for key, n, count, total in rows if count % 2 or total]
    counts = Counter({(key, n): count // 2 for key, n, count, _ in rows})
    return counts, wrong, {str(each.id): name_in(each.payload) for each in waiting}


def name_in(data: bytes) -> Name:
    """The message of a receipt."""
    order = json.loads(data)
    return str(order["key"]), int(order["n"])


async def receipts(broker: Broker) -> tuple[Counter[Name], set[str]]:
    """How often each message has a receipt in the topic, and the ids of these."""
    counts, ids = Counter[Name](), set[str]()
    try:
        topic = await broker.topics.existing(RECEIPTS)
    except (BrokerError, ConfigError):
        return counts, ids  # no such topic
    for partition in topic.numbers:
        stream = broker.keys.stream(RECEIPTS, partition)
        for _, flat in await broker.client.execute_command("XRANGE", stream, "-", "+"):
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            counts[name_in(fields[b"data"])] += 1
            ids.add(fields[b"id"].decode())
    return counts, ids


async def audit(broker: Broker, url: str, history: History) -> tuple[int, list[str]]:
    """The number of booked messages, and what is wrong: nothing, if each counted once. All workers have stopped."""
    booked, halves, waiting = bookings(url)
    sent, ids = await receipts(broker)
    sent.update(name for receipt, name in waiting.items() if receipt not in ids)
    return len(booked), halves + unsound(history, booked, sent)


def unsound(history: History, booked: Counter[Name], sent: Counter[Name]) -> list[str]:
    """What is wrong with the books, and with the receipts that were sent or wait."""
    wrong = list[str]()
    buried = {name for name, _ in history.dead}
    is_whole = not (history.rewound or history.given_up)
    for name in sorted(history.stored | history.unknown | booked.keys() | sent.keys()):
        least = int(name in history.stored and name not in buried and name not in history.given_up)
        is_known = name in history.stored or name in history.unknown
        most = sys.maxsize if is_known and history.rewound in AGAIN else int(is_known)
        if not least <= booked[name] <= most:
            wrong.append(f"{name} is booked {booked[name]} times")
        if sent[name] > booked[name] or (is_whole and sent[name] < booked[name]):
            wrong.append(f"{name} is booked {booked[name]} times and has {sent[name]} receipts")
    return wrong
