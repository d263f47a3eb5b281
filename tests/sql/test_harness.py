"""A test of a user's handlers sees what they put into an outbox, and the next test does not."""

from typing import Annotated, Any

import pytest
from fast_depends import Depends
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from rsmq import Broker
from rsmq.sql import Effects, Outbox
from rsmq.sql.tables import OUTBOX
from rsmq.testing import Harness, HarnessFixture


async def rows_in(engine: AsyncEngine) -> int:
    async with engine.connect() as connection:
        return int((await connection.execute(select(func.count()).select_from(OUTBOX))).scalar_one())


async def test_what_a_handler_and_the_test_put_into_an_outbox_is_handled(
    engine: AsyncEngine, rsmq_harness: HarnessFixture
) -> None:
    effects, outbox = Effects(async_sessionmaker(engine)), Outbox(engine)
    broker = Broker()
    broker.include(outbox)
    paid: list[Any] = []

    @broker.handler("orders", group="billing", partitions=1)
    async def bill(order: dict[str, int], session: Annotated[AsyncSession, Depends(effects.session)]) -> None:
        await outbox.publish(session, "invoices", order, key="ada", headers={"by": "billing"})
        if order["n"] == 0:
            raise ValueError(order)

    @broker.handler("invoices", group="mail", partitions=1)
    async def mail(invoice: dict[str, int]) -> None:
        paid.append(invoice)

    for attempt in (1, 2):  # the second time as the next test would
        paid.clear()
        async with rsmq_harness(broker) as test:
            [outcome] = await test.publish_and_handle("orders", {"n": 1})
            [row] = outcome.rows
            assert (row.topic, row.payload, row.key, row.headers) == ("invoices", {"n": 1}, "ada", {"by": "billing"})
            [mailed] = await test.outcomes("invoices", row.message_id)
            assert mailed.is_done
            async with async_sessionmaker(engine)() as session, session.begin():
                await outbox.publish(session, "invoices", {"n": 2})
            await test.handle()
            assert paid == [{"n": 1}, {"n": 2}]
            [failed] = await test.publish_and_handle("orders", {"n": 0})
            assert failed.rows == ()
            await test.assert_published("invoices", count=2 * attempt)


async def test_rows_that_cannot_be_relayed_are_named_and_gone_with_the_test(
    engine: AsyncEngine, rsmq_url: str, rsmq_prefix: str
) -> None:
    outbox = Outbox(engine)
    broker = Broker()
    broker.include(outbox)
    async with Harness(broker, url=rsmq_url, prefix=rsmq_prefix, patience="3s") as test:
        await broker.topics.ensure("full", 1)
        await broker.topics.change("full", max_length=1, on_full="reject")
        async with async_sessionmaker(engine)() as session, session.begin():
            for n in range(3):
                await outbox.publish(session, "full", n)
        with pytest.raises(AssertionError, match=r"Outbox .* rows to relay"):
            await test.handle()
    assert await rows_in(engine) == 0
