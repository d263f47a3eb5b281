"""Three groups read one topic, each at its own pace, and every message is stored once.

    python examples/fanout.py

Billing takes orders one by one, search takes them in batches, and mail has a provider that is down. Nobody waits for
mail, mail misses nothing, and the topic holds as many entries as were published, not three times as many.
"""

import asyncio
from datetime import timedelta

from rsmq import Broker
from rsmq.topic import Topics

TOPIC = "fanout"
ORDERS = [f"order {number}" for number in range(1, 13)]
CUSTOMERS = ("ada", "grace", "linus")

broker = Broker()
billed, indexed, mailed = asyncio.Queue[str](), asyncio.Queue[str](), asyncio.Queue[str]()
mail_provider_is_up = asyncio.Event()


@broker.handler(TOPIC, group="billing")
async def bill(order: str) -> None:
    billed.put_nowait(order)


@broker.handler(TOPIC, group="search", batch=100, linger=timedelta(milliseconds=20))
async def index(orders: list[str]) -> None:
    for order in orders:
        indexed.put_nowait(order)


@broker.handler(TOPIC, group="mail")
async def mail(order: str) -> None:
    await mail_provider_is_up.wait()
    mailed.put_nowait(order)


async def all_of(handled: asyncio.Queue[str]) -> str:
    """Wait until a group has handled every order, and say so."""
    seen = {await handled.get() for _ in ORDERS}
    assert seen == set(ORDERS) and handled.empty()
    return f"{len(seen)} handled"


async def main() -> None:
    async with broker.running():
        topics = Topics(broker.client, broker.keys, broker.settings)
        topic = await topics.ensure(TOPIC)
        before = await stored(topic.partitions)
        await broker.publish_many(TOPIC, ORDERS, key=lambda order: CUSTOMERS[ORDERS.index(order) % 3])
        print(f"published  {len(ORDERS)} orders of {len(CUSTOMERS)} customers")

        print(f"billing    {await all_of(billed)}, one by one")
        print(f"search     {await all_of(indexed)}, in batches")
        print(f"mail       {mailed.qsize()} handled: its provider is down, and nobody waits for it")
        mail_provider_is_up.set()
        print(f"mail       {await all_of(mailed)}: the provider is back, nothing was missed")

        print(f"stored     {await stored(topic.partitions) - before} entries for three groups")


async def stored(partitions: int) -> int:
    """The entries in all partitions of the topic: a partition is one Redis stream."""
    streams = [broker.keys.stream(TOPIC, partition) for partition in range(partitions)]
    return sum([await broker.client.execute_command("XLEN", stream) for stream in streams])


asyncio.run(main())
