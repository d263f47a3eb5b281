"""An application as a user would write it: the chaos kit runs its broker in other processes."""

from __future__ import annotations

import asyncio

from rsmq import Broker, Message, Reject, Router

broker = Broker(url="redis://127.0.0.1:1/0")  # nobody listens there: only the kit's own server may be used
forgetful = Broker(url="redis://127.0.0.1:1/0")
router = Router(prefix="shop.")


@router.handler("orders", group="billing")
async def bill(order: dict[str, int], message: Message) -> None:
    """Takes a moment, refuses every hundredth order, publishes an invoice."""
    await asyncio.sleep(0.002)
    if order["n"] % 100 == 99:
        raise Reject("no such customer")
    await broker.publish("invoices", order, key=message.key, message_id=f"invoice-{message.id}")


@router.handler("orders", group="audit", batch=50)
async def audit(_orders: list[dict[str, int]]) -> None:
    """A second group, in batches."""


@broker.handler("invoices", group="mail", ordering="none")
async def mail(_invoice: dict[str, int]) -> None:
    """What the first one publishes."""


broker.include(router)
