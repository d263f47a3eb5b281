"""Orders in a database: the reminder of one is sent if its transaction commits, and is cancelled with it."""

import os
from datetime import timedelta

from channels import Notification
from fastapi import APIRouter
from sqlalchemy import Column, Integer, MetaData, String, Table
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from rsmq.sql import Outbox, create_tables

REMIND_AFTER = timedelta(seconds=float(os.environ.get("REMIND_AFTER", "3600")))
metadata = MetaData()
ORDERS = Table("orders", metadata, Column("number", Integer, primary_key=True), Column("user", String(40)))

engine = create_async_engine(os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///orders.db"))
sessions = async_sessionmaker(engine)
outbox = Outbox(engine)
router = APIRouter()


async def make_tables() -> None:
    """Those of the service, and those of the outbox."""
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
        await connection.run_sync(create_tables)


@router.put("/orders/{number}", status_code=201)
async def place(number: int, user: str, zone: str = "Asia/Seoul") -> None:
    """Store an order, and a reminder to pay it."""
    async with sessions.begin() as session:
        await session.execute(ORDERS.insert(), {"number": number, "user": user})
        await outbox.publish(
            session, "push", Notification(user=user, text=f"please pay order {number}"), key=user,
            message_id=f"order-{number}", delay=REMIND_AFTER, headers={"tenant": "shop", "tz": zone},
        )  # fmt: skip


@router.delete("/orders/{number}", status_code=204)
async def take_back(number: int, user: str) -> None:
    """Delete an order and its reminder: both, or neither."""
    async with sessions.begin() as session:
        await session.execute(ORDERS.delete().where(ORDERS.c.number == number))
        await outbox.cancel(session, f"order-{number}", "push", key=user)
