"""An application as a user would write it: `Chaos` runs its broker in other processes."""

from __future__ import annotations

import asyncio

from rsmq import Broker, Message, Reject, Router

broker = Broker(url="redis://127.0.0.1:1/0")  # no server there: only that of `Chaos` may be used
forgetful = Broker(url="redis://127.0.0.1:1/0")
router = Router(prefix="shop.")


@router.handler("orders", group="billing")
async def bill(order: dict[str, int], message: Message) -> None:
    """Take a moment, reject every hundredth order, publish an invoice."""
    await asyncio.sleep(0.002)
    if order["n"] % 100 == 99:
        raise Reject("no such customer")
    await broker.publish("invoices", order, key=message.key, message_id=f"invoice-{message.id}")


@router.handler("orders", group="audit", batch=50)
async def audit(_orders: list[dict[str, int]]) -> None:
    """A second group, in batches."""


@broker.handler("invoices", group="mail", ordering="none")
async def mail(_invoice: dict[str, int]) -> None:
    """Handle the invoices that the first handler publishes."""


broker.include(router)
