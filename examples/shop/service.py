"""A shop: an order becomes an invoice in the database, and the invoice a receipt. Each once, whatever is killed.

cd examples/shop
DATABASE_URL=sqlite+aiosqlite:///shop.db rsmq worker service:broker
"""

import os
from datetime import timedelta
from typing import Annotated

from fast_depends import Depends
from sqlalchemy import Column, Integer, MetaData, String, Table
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from tenacity import wait_random

from rsmq import Broker, Message, RetryPolicy
from rsmq.sql import Effects, Outbox

URL = os.environ["DATABASE_URL"]
IS_SQLITE = URL.startswith("sqlite")
PATIENT = RetryPolicy(max_attempts=1000, wait=wait_random(0.05, 0.2))

metadata = MetaData()
COLUMNS = ("number", Integer), ("customer", String(40)), ("amount", Integer)
# no unique constraint: a second invoice of an order would be stored, and the verdict would count it
ORDERS = Table("shop_orders", metadata, *(Column(*column) for column in COLUMNS))
INVOICES = Table("shop_invoices", metadata, *(Column(*column) for column in COLUMNS))

engine = create_async_engine(URL, connect_args={"timeout": 30} if IS_SQLITE else {})
sessions = async_sessionmaker(engine)
effects, outbox = Effects(sessions), Outbox(engine, poll=timedelta(milliseconds=20))
broker = Broker()
broker.include(outbox)


async def place(order: dict) -> None:
    """The order and its message are committed together."""
    async with sessions.begin() as session:
        await session.execute(ORDERS.insert(), order)
        await outbox.publish(session, "orders", order, key=order["customer"])


# SQLite has one writer at a time
@broker.handler("orders", group="billing", retry=PATIENT, concurrency=1 if IS_SQLITE else 10)
async def bill(order: dict, session: Annotated[AsyncSession, Depends(effects.session)]) -> None:
    """The invoice, its message and the mark of the order are committed together."""
    await session.execute(INVOICES.insert(), order)
    await outbox.publish(session, "invoices", order, key=order["customer"])


@broker.handler("invoices", group="mail", retry=PATIENT)
async def thank(invoice: dict, message: Message) -> None:
    """The receipt is stored in the same step that settles the invoice: no database is needed."""
    text = f"thank you, {invoice['customer']}: {invoice['amount']} for order {invoice['number']}"
    await message.publish("receipts", {"number": invoice["number"], "text": text}, key=invoice["customer"])
