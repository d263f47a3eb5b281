"""The outbox takes the options of a publish: they are kept in the row, and hold when the relay stores the message."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from rsmq import Broker, ConfigError, Message
from rsmq.model.message import becomes_dead
from rsmq.sql import Outbox, create_tables
from rsmq.sql.row_options import RowOptions
from rsmq.sql.tables import OUTBOX
from tests.contract.witness import ask, dies
from tests.patience import until
from tests.sql.test_outbox import is_empty

FAR = datetime(2099, 1, 1, tzinfo=UTC)


@dataclass
class Order:
    """A payload."""

    n: int


@pytest.fixture
async def lite(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    """SQLite with the tables."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}")
    async with engine.begin() as connection:
        await connection.run_sync(create_tables)
    yield engine
    await engine.dispose()


class Orders:
    """An outbox whose broker handles the topic `orders`, and what was handled."""

    def __init__(self, broker: Broker, engine: AsyncEngine) -> None:
        self.broker, self.engine, self.outbox = broker, engine, Outbox(engine)
        self.seen = list[Message]()
        broker.include(self.outbox)

        @broker.handler("orders", group="billing")
        async def bill(message: Message) -> None:
            self.seen.append(message)

    async def publish(self, payload: Any, **options: Any) -> str:
        """In a transaction of its own."""
        async with self.engine.begin() as connection:
            return await self.outbox.publish(connection, "orders", payload, **options)

    async def cancel(self, message_id: str, **options: Any) -> None:
        """In a transaction of its own."""
        async with self.engine.begin() as connection:
            await self.outbox.cancel(connection, message_id, "orders", **options)

    async def age(self, span: timedelta) -> None:
        """All rows have been waiting for so long."""
        async with self.engine.begin() as connection:
            await connection.execute(OUTBOX.update().values(created_at=datetime.now(UTC) - span))

    async def is_relayed(self) -> None:
        """Until no row waits."""
        await until(lambda: is_empty(self.outbox), "nothing waits")

    @property
    def data(self) -> list[bytes]:
        """The payloads that were handled, in order."""
        return [message.data for message in self.seen]


@pytest.fixture
def orders(broker: Broker, lite: AsyncEngine) -> Orders:
    """On SQLite."""
    return Orders(broker, lite)


async def test_a_plain_row_has_no_options(orders: Orders) -> None:
    """The column is empty, so nothing is read from it."""
    await orders.publish(1, key="k", headers={"a": "b"}, delay="1s", band="normal")
    async with orders.engine.connect() as connection:
        assert (await connection.scalars(select(OUTBOX.c.options))).all() == [None]


@pytest.mark.parametrize("options", [{}, {"delay": "10ms"}], ids=["now", "delayed"])
async def test_a_given_message_id_is_stored_once(orders: Orders, options: dict[str, Any]) -> None:
    """Of two rows, of a row and a publish, and also with another key: as by `broker.publish`."""
    broker = orders.broker
    async with broker:
        await broker.publish("orders", "before", key="k", message_id="m1")
    assert await orders.publish("late", key="k", message_id="m1", **options) == "m1"
    assert await orders.publish("first", key="k", message_id="m2", **options) == "m2"
    await orders.publish("second", key="k", message_id="m2", **options)
    await orders.publish("other key", key="j", message_id="m2", **options)
    async with broker.running():
        await orders.is_relayed()
        ref = await broker.publish("orders", "after", key="k", message_id="m2")
        assert ref.is_new is False
        await until(lambda: len(orders.seen) == 2, "two are handled")
    assert sorted((message.id, message.data) for message in orders.seen) == [("m1", b"before"), ("m2", b"first")]


async def test_a_row_with_a_message_id_that_was_relayed_is_not_relayed_again(orders: Orders) -> None:
    """Its relay has died before the row was deleted: the next one skips it, also when the id is forgotten."""
    await orders.publish(1, key="k", message_id="m1")
    async with orders.engine.connect() as connection:
        (row,) = (await connection.execute(select(OUTBOX))).mappings().all()
    broker = orders.broker
    async with broker.running():
        await until(lambda: len(orders.seen) == 1, "it is handled")
        await orders.is_relayed()
    async with orders.engine.begin() as connection:
        await connection.execute(OUTBOX.insert(), {**row, "seq": None})
    async with broker.running():
        await orders.is_relayed()
    assert orders.data == [b"1"]


async def test_an_expiry_counts_from_the_insert(orders: Orders) -> None:
    """A row that waits for its relay does not live longer for that; a moment stays what it is."""
    begin = time.time()
    await orders.publish("short", key="k", expires="1m", on_expiry="dead")
    await orders.age(timedelta(minutes=5))
    await orders.publish("span", key="k", expires="1h")
    await orders.publish("moment", key="k", expires=FAR, on_expiry="dead")
    await orders.publish("delayed", key="k", expires="1h", delay="10ms")
    async with orders.broker.running():
        await dies(orders.broker, "orders", "billing", 1)
        await until(lambda: len(orders.seen) == 3, "three are handled")
    found = {message.data: message for message in orders.seen}
    assert found[b"moment"].expires == FAR
    assert becomes_dead(found[b"moment"])
    for name in (b"span", b"delayed"):
        at = found[name].expires
        assert at is not None
        assert -2 < at.timestamp() - begin - 3600 < 60
        assert not becomes_dead(found[name])


async def test_a_unique_name_is_kept_by_the_first_message(orders: Orders) -> None:
    """One after the other, in the order of the rows; what another message keeps out is counted."""
    await orders.publish("before", key="u7")
    await orders.publish("first", key="u7", unique="cart-7")
    await orders.publish("kept out", key="u7", unique="cart-7")
    await orders.publish("replaced", key="u8", unique="cart-8", delay="1h")
    await orders.publish("replaces", key="u8", unique="cart-8", on_conflict="replace", until="started")
    await orders.publish("after", key="u7")
    broker = orders.broker
    broker.handlers.clear()
    async with broker.running():
        await orders.is_relayed()
        relay = orders.outbox.relay
        assert relay is not None
        assert (relay.kept_out, relay.relayed) == (1, 5)
        topic = await broker.topics.existing("orders")
        found = dict[bytes, list[bytes]]()
        for number in topic.numbers:
            for _, flat in await ask(broker, "XRANGE", broker.keys.stream("orders", number), "-", "+"):
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                found.setdefault(fields[b"key"], []).append(fields[b"data"])
    assert found == {b"u7": [b"before", b"first", b"after"], b"u8": [b"replaces"]}


async def test_a_cancel_behind_its_message_in_the_table_sends_neither(orders: Orders) -> None:
    """Also with a given id, and if the message is delayed. Others of its key go on, in order."""
    first = await orders.publish(1, key="k")
    await orders.publish(2, key="k", message_id="two")
    await orders.publish(3, key="k", delay="1h", message_id="three")
    await orders.publish(4, key="k")
    await orders.cancel(first, key="k")
    await orders.cancel("two")
    await orders.cancel("three", key="k")
    await orders.publish(5, key="k")
    async with orders.broker.running():
        await orders.is_relayed()
        await until(lambda: len(orders.seen) == 2, "the others are handled")
        for number in (await orders.broker.topics.existing("orders")).numbers:
            assert not await ask(orders.broker, "ZCARD", orders.broker.keys.delayed("orders", number))
    assert orders.data == [b"4", b"5"]


async def test_a_cancel_of_a_message_that_was_relayed_marks_it(orders: Orders) -> None:
    """As `broker.cancel` does: what waits in the server does not start, also if another publisher has sent it."""
    broker = orders.broker
    async with broker.running():
        delayed = await orders.publish("delayed", key="k", delay="1h")
        await orders.is_relayed()
        other = await broker.publish("orders", "also delayed", key="k", delay="1h")
        await orders.cancel(delayed, key="k")
        await orders.cancel(other)
        await orders.cancel("of no message", key="k")
        await orders.is_relayed()
        for identity in (delayed, other):
            assert (await broker.look(identity, topic="orders", key="k")).state == "cancelled"
    assert not orders.seen


async def test_a_cancel_of_a_row_that_a_dead_relay_has_sent_marks_it(orders: Orders) -> None:
    """The row is still in the table, and its message in the stream: it is not taken for one that was not sent."""
    broker = orders.broker
    ref = await orders.publish(1, key="k")
    async with orders.engine.connect() as connection:
        (row,) = (await connection.execute(select(OUTBOX))).mappings().all()
    broker.handlers.clear()
    async with broker.running():
        await orders.is_relayed()
    async with orders.engine.begin() as connection:
        await connection.execute(OUTBOX.insert(), {**row, "seq": None})
        await orders.outbox.cancel(connection, ref, "orders", key="k")
    async with broker.running():
        await orders.is_relayed()
        topic = await broker.topics.existing("orders")
        lengths = [await ask(broker, "XLEN", broker.keys.stream("orders", number)) for number in topic.numbers]
        assert sum(lengths) == 0, "no group has it, so it is deleted, as by broker.cancel"


async def test_rows_of_typed_topics_are_checked_where_they_are_written(orders: Orders) -> None:
    """As by `topic.publish`; each wrong option says what is wrong."""
    numbers = orders.broker.topic("orders", Order)
    async with orders.engine.begin() as connection:
        await orders.outbox.publish(connection, numbers, Order(1))
        await orders.outbox.publish_many(connection, numbers, [Order(2)], expires="1h", wait_replicas=0)
        with pytest.raises(ConfigError, match="has payloads of Order, not str"):
            await orders.outbox.publish(connection, numbers, "x")
        for options, why in (
            ({"message_id": ""}, "message_id='' is not possible"),
            ({"expires": "-1s"}, "is not a duration"),
            ({"expires": "1s", "delay": "2s"}, "never be handled"),
            ({"on_expiry": "dead"}, "needs expires"),
            ({"until": "started"}, "need unique"),
            ({"unique": "u", "on_conflict": "extend"}, "give delay or at"),
            ({"wait_replicas": -1}, "wait_replicas=-1 is not possible"),
            ({"expire": "1s"}, "unknown option 'expire'. Did you mean expires"),
        ):
            with pytest.raises(ConfigError, match=why):
                await orders.outbox.publish(connection, "orders", 1, **options)
        with pytest.raises(ConfigError, match="message_id"):
            await orders.outbox.cancel(connection, "", "orders")


async def test_options_of_another_program_that_cannot_be_read_stop_nothing(orders: Orders) -> None:
    """The reason is in the column `error`."""
    async with orders.engine.begin() as connection:
        for text in ("{", '{"other": 1}', '{"expires": "soon"}', '{"message_id": 5}', '{"unique": "u", "till": "x"}'):
            row = {"id": uuid.uuid4(), "aggregatetype": "orders", "payload": b"1", "options": text}
            await connection.execute(OUTBOX.insert(), {**row, "deployment": orders.broker.keys.prefix})
        await orders.outbox.publish(connection, "orders", 2)
    async with orders.broker.running():
        await until(lambda: len(orders.seen) == 1, "the good one is handled")
        await orders.is_relayed()
    async with orders.engine.connect() as connection:
        errors = [str(each) for each in (await connection.scalars(select(OUTBOX.c.error).order_by(OUTBOX.c.seq))).all()]
    assert len(errors) == 5
    for error, why in zip(errors, ("no JSON", "other names", "no time", "no text", "till='x'"), strict=True):
        assert why in error


async def test_a_row_that_asks_for_replicas_waits_for_them(orders: Orders) -> None:
    """There is none here: the row stays, its message is stored once, and rows that ask for none go on."""
    await orders.publish(1, key="k", wait_replicas=1)
    async with orders.broker.running():
        await until(lambda: orders.data == [b"1"], "it is handled")
        status = await orders.outbox.status()
        assert status.backlog == 1
        async with orders.engine.begin() as connection:
            await connection.execute(OUTBOX.update().values(options=None))
        await orders.is_relayed()
    assert orders.data == [b"1"]


def test_options_come_back_as_they_were_written() -> None:
    """Only what is given is in the column."""
    every = RowOptions.checked(
        "+5", message_id="m", expires=timedelta(hours=1), on_expiry="dead", unique="u", until="5m",
        on_conflict="replace", wait_replicas=2,
    )  # fmt: skip
    text = every.to_text()
    assert text is not None
    assert RowOptions.read(text) == every
    assert every.expires == "+3600000"
    assert every.till == "300000"
    assert set(json.loads(text)) == {
        "message_id", "expires", "on_expiry", "unique", "till", "on_conflict", "wait_replicas"
    }  # fmt: skip


async def test_options_and_cancels_on_each_database(engine: AsyncEngine, broker: Broker) -> None:
    """The column is text in each of them, and the row of a cancel fits."""
    orders = Orders(broker, engine)
    await orders.publish("once", key="k", message_id="m1", expires="1h")
    await orders.publish("twice", key="k", message_id="m1")
    await orders.publish("named", key="k", unique="n")
    await orders.publish("cancelled", key="k", message_id="m2")
    await orders.cancel("m2", key="k")
    async with engine.begin() as connection:
        await orders.outbox.cancel(connection, "m3", "t" * 128)
    async with broker.running():
        await orders.is_relayed()
        await until(lambda: len(orders.seen) == 2, "they are handled")
    assert orders.data == [b"once", b"named"]
    assert orders.seen[0].expires is not None


async def test_rows_come_in_the_order_of_their_due_times_after_an_outage(orders: Orders) -> None:
    """No worker ran meanwhile: what was delayed in the server, overdue rows, and then a row without a time."""
    broker = orders.broker
    async with broker:
        await broker.publish("orders", "1 delayed by a publisher", key="k", delay="1ms")
    await orders.publish("3 later", key="k", delay="1m")
    await orders.publish("2 earlier", key="k", delay="30s")
    await orders.age(timedelta(minutes=5))
    await anyio.sleep(0.01)
    await orders.publish("4 without a time", key="k")
    async with broker.running():
        await orders.is_relayed()
        await until(lambda: len(orders.seen) == 4, "all are handled")
    others = [data for data in orders.data if data != b"1 delayed by a publisher"]
    assert others == [b"2 earlier", b"3 later", b"4 without a time"]
    assert orders.data.index(b"1 delayed by a publisher") < orders.data.index(b"4 without a time")
