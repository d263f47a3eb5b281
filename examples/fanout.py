"""Three groups read one topic, each at its own pace, and every message is stored once.

    python examples/fanout.py

Billing takes orders one by one, search takes them in batches, and mail has a provider that is down. The other groups
do not wait for mail. Mail loses no message. The topic holds each message once, not three times.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from rsmq import Broker

TOPIC = "fanout"


@dataclass(frozen=True)
class Order:
    number: int
    customer: str


CUSTOMERS = ("ada", "grace", "linus")
ORDERS = [Order(number, CUSTOMERS[number % 3]) for number in range(12)]

broker = Broker()
billed, indexed, mailed = asyncio.Queue[Order](), asyncio.Queue[Order](), asyncio.Queue[Order]()
mail_provider_is_up = asyncio.Event()


@broker.handler(TOPIC, group="billing")
async def bill(order: Order) -> None:
    billed.put_nowait(order)


@broker.handler(TOPIC, group="search", batch=100, linger=timedelta(milliseconds=20))
async def index(orders: list[Order]) -> None:
    for order in orders:
        indexed.put_nowait(order)


@broker.handler(TOPIC, group="mail")
async def mail(order: Order) -> None:
    await mail_provider_is_up.wait()
    mailed.put_nowait(order)


async def all_of(handled: asyncio.Queue[Order]) -> str:
    """Wait until a group has handled every order, and say so."""
    seen = {await handled.get() for _ in ORDERS}
    assert seen == set(ORDERS), "each order, each once"
    return f"{len(seen)} handled"


async def main() -> None:
    async with broker.running():
        topic = await broker.topics.ensure(TOPIC)
        before = await stored(topic.numbers)
        await broker.publish_many(TOPIC, ORDERS, key=lambda order: order.customer)
        print(f"published  {len(ORDERS)} orders of {len(CUSTOMERS)} customers")

        print(f"billing    {await all_of(billed)}, one by one")
        print(f"search     {await all_of(indexed)}, in batches")
        print(f"mail       {mailed.qsize()} handled: its provider is down, and the other groups go on")
        mail_provider_is_up.set()
        print(f"mail       {await all_of(mailed)}: the provider is back, nothing was missed")

        print(f"stored     {await stored(topic.numbers) - before} entries for three groups")


async def stored(partitions: Sequence[int]) -> int:
    """The entries in all partitions of the topic: a partition is one Redis stream."""
    streams = [broker.keys.stream(TOPIC, partition) for partition in partitions]
    return sum([await broker.client.execute_command("XLEN", stream) for stream in streams])


asyncio.run(main())
