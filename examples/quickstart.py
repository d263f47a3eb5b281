"""Publish three orders, handle them in order, stop. No server to install: without RSMQ_URL one is started for you.

    python examples/quickstart.py

Handling the last order stops the worker, and with it the program.
"""

import asyncio

from rsmq import Broker

broker = Broker()


@broker.handler("orders", group="billing")
async def bill(order: dict) -> None:
    print(f"billed {order['customer']} for order {order['number']}")
    if order["number"] == 3:
        broker.stop()


async def main() -> None:
    async with broker:
        for number in (1, 2, 3):
            await broker.publish("orders", {"customer": "ada", "number": number}, key="ada")
        await broker.run()


asyncio.run(main())
