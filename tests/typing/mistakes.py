"""Mistakes that a type checker must find: one that it does not find is an ignore too many, and so an error.

Checked by mypy (`make check`) and pyright (`test_typing.py`) in their strict modes; never run.
"""

from __future__ import annotations

from datetime import timedelta

from pydantic import BaseModel

from rsmq import Broker, Message, Publication, Rate, Settings, SyncBroker

broker = Broker()
broker.handler("orders", group="g", ordering="random")  # type: ignore[arg-type]  # there is no such order
broker.handler("orders")  # type: ignore[call-arg]  # a group is needed
broker.handler("orders", group="g", concurency=8)  # type: ignore[call-arg]  # there is no such option
broker.handler("orders", group="g", rate=100)  # type: ignore[arg-type]  # a bare number is no rate
broker.every(3600, "ticks")  # type: ignore[arg-type]  # a bare number is no time
broker.every("@daily", "ticks", missed="all")  # type: ignore[arg-type]  # the latest of them, or none
broker.publish_sync("orders", {}, delay=5)  # type: ignore[arg-type]  # a bare number is no time
broker.publish_sync("orders", {}, kye="k")  # type: ignore[call-arg]  # there is no such option
Rate(1, per=timedelta(seconds=1), over="all")  # type: ignore[arg-type]  # over the group, or each member
Broker(lease_tll="PT6S")  # type: ignore[call-arg]  # there is no such setting
Broker(5)  # type: ignore[arg-type]  # a server is a URL
Rate(1, per=1)  # type: ignore[arg-type]  # a bare number is no time
Broker(lease_ttl=6)  # type: ignore[arg-type]  # a bare number is no time
Settings(partitions="8", on_full="drop")  # type: ignore[arg-type]  # a count is a number; full topics refuse or trim


class Order(BaseModel):
    """The payload of a typed topic."""

    total: float


class Refund(BaseModel):
    """The payload of another one."""

    total: float


orders = broker.topic("orders", Order)
orders.publish_sync(Refund(total=1))  # type: ignore[arg-type]  # another payload
orders.publish_sync({"total": 1})  # type: ignore[arg-type]  # a dict is no Order
orders.publish_sync(Order(total=1), delay=5)  # type: ignore[arg-type]  # a bare number is no time
orders.publish_sync(Order(total=1), kye="k")  # type: ignore[call-arg]  # there is no such option
orders.handler(concurrency=8)  # type: ignore[call-overload]  # a group is needed
orders.handler(group="g", linger="50ms")  # type: ignore[call-overload]  # only batches wait


async def publish_others() -> None:
    """The same for the coroutines."""
    await orders.publish(Refund(total=1))  # type: ignore[arg-type]  # another payload
    await orders.publish_many([Refund(total=1)])  # type: ignore[list-item]  # other payloads
    await orders.publish_many([Order(total=1)], key=lambda order: order.customer)  # type: ignore[attr-defined]


@orders.handler(group="a")  # type: ignore[arg-type]  # another payload
async def refund(refund: Refund) -> None:
    """Another payload."""


@orders.handler(group="b")  # type: ignore[arg-type]  # a list without batch
async def listed(orders: list[Order]) -> None:
    """Lists are for batches."""


@orders.handler(group="c", batch=10)  # type: ignore[arg-type]  # a batch without a list
async def single(order: Order) -> None:
    """A batch is a list."""


@orders.handler(group="d")  # type: ignore[arg-type]  # another payload after the message
async def reversed_order(message: Message, refund: Refund) -> None:
    """The payload is wrong in any place."""


@orders.handler(group="e")  # type: ignore[arg-type]  # no parameter
async def nothing() -> None:
    """A handler takes something."""


@broker.on_error  # type: ignore[type-var]  # the message comes first
def only_the_error(error: BaseException) -> None:
    """A hook gets both."""


@broker.before_publish  # type: ignore[type-var]  # it is a plain function
async def too_late(publication: Publication) -> None:
    """It would run after the message is encoded."""


Broker(headers={"retries": 3})  # type: ignore[dict-item]  # names and values are text

sync_broker = SyncBroker()
sync_broker.publish("orders", {}, delay=5)  # type: ignore[arg-type]  # a bare number is no time
sync_broker.publish("orders", {}, kye="k")  # type: ignore[call-arg]  # there is no such option
sync_broker.handler("orders")  # type: ignore[call-arg]  # a group is needed
sync_broker.devices.find(5)  # type: ignore[arg-type]  # an id is text
sync_orders = sync_broker.topic("orders", Order)
sync_orders.publish(Refund(total=1))  # type: ignore[arg-type]  # another payload
