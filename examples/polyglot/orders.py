"""The Python side: it and `orders.js` publish to one topic, and each handles what both have published.

    python orders.py publish
    python orders.py handle COUNT

What this prints and how to run the other side: README.md.
"""

import asyncio
import sys
from dataclasses import dataclass

from rsmq import Broker, Message

TOPIC = "polyglot"
CUSTOMERS = ("c-42", "grüß", "주문")

broker = Broker()
handled = asyncio.Queue[str]()


@dataclass
class Order:
    customer: str
    number: int
    sender: str


@broker.handler(TOPIC, group="python")
async def handle(order: Order, message: Message) -> None:
    print(f"order {order.number} of {order.customer} from {order.sender} in partition {message.partition}")
    handled.put_nowait(message.id)


async def publish_orders() -> None:
    async with broker:
        for customer in CUSTOMERS:
            for number in (1, 2):
                await broker.publish(TOPIC, Order(customer, number, "python"), key=customer)


async def handle_orders(count: int) -> None:
    async with broker.running():
        for _ in range(count):
            await handled.get()


match sys.argv[1:]:
    case ["publish"]:
        asyncio.run(publish_orders())
    case ["handle", count]:
        asyncio.run(handle_orders(int(count)))
    case _:
        sys.exit(__doc__)
