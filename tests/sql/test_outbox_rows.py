"""Rows of other programs in an outbox on SQLite, which stores values of any type in any column."""

import uuid
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.ext.asyncio import create_async_engine

from rsmq import Broker, Message
from rsmq.sql import Outbox, create_tables
from rsmq.sql.tables import OUTBOX
from tests.patience import until
from tests.sql.test_outbox import is_empty, recorded


async def test_row_of_a_wrong_type_is_marked_and_stops_nothing(tmp_path: Path, broker: Broker) -> None:
    """It gets the reason in its column `error`, and the next one is published."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}")
    outbox, seen = Outbox(engine), recorded(broker)
    broker.include(outbox)
    rows = [("'{}'", "NULL", uuid.uuid4().hex), ("x'31'", "x'31'", uuid.uuid4().hex), ("x'31'", "NULL", "no id")]
    async with engine.begin() as connection:
        await connection.run_sync(create_tables)
        for payload, headers, row_id in (*rows, ("x'31'", "NULL", uuid.uuid4().hex)):
            await connection.exec_driver_sql(
                f"INSERT INTO rsmq_outbox (deployment, id, aggregatetype, payload, headers) "
                f"VALUES ('{broker.keys.prefix}', '{row_id}', 'orders', {payload}, {headers})"
            )
    async with broker.running():
        await until(lambda: seen == ["1"], "the good one is handled")
        await until(lambda: is_empty(outbox), "nothing waits")
    async with engine.connect() as connection:
        errors = (await connection.scalars(select(OUTBOX.c.error).order_by(OUTBOX.c.seq))).all()
    await engine.dispose()
    assert errors[:2] == ["the payload is str, not bytes: write a BLOB", "the headers are bytes, not text"]
    assert "badly formed" in str(errors[2])


async def test_rows_go_to_their_band_and_one_without_such_a_band_is_marked(tmp_path: Path, broker: Broker) -> None:
    """NULL is `normal`. What names no band of the topic waits for nothing: its reason is in the column `error`."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}")
    outbox, partitions = Outbox(engine), dict[str, int]()
    broker.include(outbox)
    sms = broker.topic("sms", str, bands=("urgent", "normal"))

    @sms.handler(group="g")
    async def handle(text: str, message: Message) -> None:
        partitions[text] = message.partition

    async with engine.begin() as connection:
        await connection.run_sync(create_tables)
        await outbox.publish(connection, "sms", "u", band="urgent")
        await outbox.publish(connection, "sms", "n")
        await outbox.publish(connection, "sms", "x", band="bulk")
    async with broker.running():
        await until(lambda: len(partitions) == 2, "two are handled")
        await until(lambda: is_empty(outbox), "nothing waits")
        topic = await broker.topics.existing("sms")
    async with engine.connect() as connection:
        errors = (await connection.scalars(select(OUTBOX.c.error))).all()
    await engine.dispose()
    assert partitions["n"] in topic.normal.numbers
    assert partitions["u"] in topic.open_block("urgent").numbers
    assert len(errors) == 1
    assert "has no band 'bulk'" in str(errors[0])
