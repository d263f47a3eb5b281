"""What a user writes, as far as types matter: checked by mypy and pyright in their strict modes, never run.

`assert_type` says what an editor must know; what must be refused is in `mistakes.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, assert_type

from fast_depends import Depends
from fastapi import Depends as RequestDepends
from fastapi import FastAPI
from pydantic import BaseModel

from rsmq import (
    Broker,
    BrokerError,
    Letter,
    Message,
    MessageRef,
    Publication,
    Rate,
    Reject,
    Retry,
    RetryPolicy,
    Router,
    Session,
    Settings,
    SyncBroker,
    TypedTopic,
)
from rsmq.asgi import connected, lifespan
from rsmq.redis.topics import Topic
from rsmq.testing import Chaos, Harness, Outcome, Verdict


class Order(BaseModel):
    """A payload."""

    customer: str
    total: float


@dataclass
class Database:
    """A resource."""

    name: str


async def database() -> AsyncIterator[Database]:
    """A dependency."""
    yield Database("shop")


broker = Broker(url="redis://localhost:6379/0", lease_ttl=timedelta(seconds=6))
other = Broker(Settings(prefix="other"))
by_url = Broker("redis://localhost:6379/0", lease_ttl="6s")
router = Router(prefix="shop.")


@router.handler("orders", group="billing", concurrency=8, retry=RetryPolicy(max_attempts=3), rate=Rate(100))
async def bill(order: Order, message: Message, db: Annotated[Database, Depends(database)]) -> None:
    """A handler keeps its type: it can be called as it is."""
    assert_type(message.key, str | None)
    assert_type(message.headers, dict[str, str])
    assert_type(message.timestamp, datetime)
    assert_type(message.attempt, int)
    if order.total < 0:
        raise Reject("a negative total")
    if db.name != "shop":
        raise Retry("not yet", after="1m")
    published = await broker.publish("invoices", order, key=order.customer, delay=timedelta(seconds=1))
    assert_type(published, MessageRef)


@router.handler("orders", group="audit", batch=500, linger="50ms", timeout=timedelta(seconds=30))
async def audit(orders: list[Order]) -> list[Exception | None]:
    """A batch handler."""
    return [None for _ in orders]


@router.handler("resize", group="images", execution="thread", distribution="shared")
def resize(job: dict[str, int]) -> None:
    """A plain function."""


@router.every("0 * * * *", "reports", timezone="Europe/Berlin", missed="skip")
def report(at: datetime) -> Order:
    """A schedule."""
    return Order(customer=at.isoformat(), total=0)


@router.every("5m", "ticks", key="k")
async def tick() -> str | None:
    """Another one."""
    return None


orders_topic = broker.topic("orders", Order)
jobs: TypedTopic[Order | str] = broker.topic("jobs", Order | str)
raw = broker.topic("raw", dict[str, int])


@orders_topic.handler(group="typed", concurrency=8, timeout="30s")
async def typed(order: Order) -> None:
    """The payload alone."""


@orders_topic.handler(group="typed-with-message")
async def typed_with_message(order: Order, message: Message) -> str:
    """With the message, and a result."""
    return message.id


@orders_topic.handler(group="typed-message-first")
async def typed_message_first(message: Message, order: Order) -> None:
    """In the other order."""


@orders_topic.handler(group="typed-message")
def typed_message(message: Message) -> None:
    """The message alone, in a thread."""


@orders_topic.handler(group="typed-with-dependency")
async def typed_with_dependency(order: Order, db: Annotated[Database, Depends(database)]) -> None:
    """With a dependency."""


@orders_topic.handler(group="typed-batch", batch=100, linger="50ms")
async def typed_batch(orders: list[Order], messages: list[Message]) -> list[Exception | None]:
    """A batch."""
    return [None for _ in orders]


@orders_topic.handler(group="typed-above")
async def typed_above(order: BaseModel) -> None:
    """A class above that of the topic."""


@jobs.handler(group="workers")
async def work(job: Order | str) -> None:
    """A union."""


broker.include(router, prefix="eu.")


@broker.middleware
async def measure(message: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
    """A middleware."""
    return await call_next(message)


@broker.on_error
def to_sentry(message: Message, error: BaseException) -> None:
    """A hook for errors."""
    print(message.id, error)


@broker.before_publish
def stamp(publication: Publication) -> None:
    """Middleware for publishing."""
    publication.headers["tenant"] = "ada"


@broker.lifespan
@asynccontextmanager
async def resources() -> AsyncGenerator[None, None]:
    """Around every worker."""
    yield


app = FastAPI(lifespan=lifespan(broker, worker=True))


@app.post("/orders")
async def order(order: Order, queue: Annotated[Broker, RequestDepends(connected)]) -> str:
    """From a request."""
    return await queue.publish("shop.orders", order, key=order.customer)


def sync_view(order: Order) -> str:
    """From Django or Flask."""
    orders_topic.publish_sync(order, key=order.customer)
    return broker.publish_sync("shop.orders", order, key=order.customer, message_id="one")


async def publish() -> None:
    """From anywhere."""
    async with broker as opened:
        assert_type(opened, Broker)
        orders = [Order(customer="ada", total=1)]
        ids = await broker.publish_many("shop.orders", orders, key=lambda each: each.customer)
        assert_type(ids, list[str])
        try:
            await broker.publish("shop.orders", {"n": 1}, at=datetime.now(UTC))
        except BrokerError as error:
            print(error)
        await broker.send("device-1", {"text": "hello"}, topic="alerts", expires="1m")
        assert_type(orders_topic, TypedTopic[Order])
        assert_type(await orders_topic.publish(orders[0], key="ada", delay="5m"), MessageRef)
        assert_type(await orders_topic.publish_many(orders, key=lambda each: each.customer), list[str])
        assert_type(await jobs.publish("now"), MessageRef)
        assert_type(await raw.publish({"n": 1}), MessageRef)
        async with broker.connect("device-1", window=10) as session:
            assert_type(session, Session)
            async for letter in session:
                assert_type(letter, Letter)
                await session.ack(letter)
        async with broker.running() as running:
            assert_type(running, Broker)


async def test_billing(rsmq_harness: Callable[..., Harness], rsmq_chaos: type[Chaos]) -> None:
    """A test of the user's own."""
    async with rsmq_harness(broker) as test:
        outcomes = await test.publish_and_handle("eu.shop.orders", Order(customer="ada", total=1), key="ada")
        assert_type(outcomes, list[Outcome])
        await test.advance("1h")
        assert_type(await test.assert_published("invoices"), list[Message])
    async with rsmq_chaos("shop:broker", workers=3) as chaos:
        await chaos.publish("orders", {"n": 1}, key="k")
        chaos.kill()
        assert_type(await chaos.verdict(), Verdict)


async def direct() -> None:
    """A registered function is unchanged."""
    assert_type(await audit([]), list[Exception | None])
    await typed(Order(customer="ada", total=1))
    assert_type(await typed_with_dependency(Order(customer="ada", total=1), db=Database("x")), None)
    assert_type(await typed_batch([], []), list[Exception | None])
    resize({"n": 1})
    assert_type(report(datetime.now(UTC)), Order)


def without_a_loop() -> None:
    """The methods of a `SyncBroker` have the types of those of `Broker`."""
    sync = SyncBroker("redis://localhost", lease_ttl="6s")
    orders = sync.topic("orders", Order)

    @orders.handler(group="billing")
    def bill(order: Order, message: Message) -> bool:
        return orders.publish(order, key=message.key) != ""

    @sync.handler("audit", group="audit")
    def note(order: Order) -> int:
        return 1

    @sync.on_error
    def oops(message: Message, error: BaseException) -> None:
        pass

    with sync as same, same.running():
        assert_type(same.publish("orders", Order(customer="ada", total=1), delay="5s"), MessageRef)
        assert_type(same.publish_many("orders", [1, 2], key=lambda n: str(n + 1)), list[str])
        assert_type(same.topics.find("orders"), Topic | None)
        assert_type([device.backlog for device in same.devices.iterate()], list[int])
        with same.connect("device-1") as session:
            for letter in session:
                assert_type(letter, Letter)
                session.ack(letter)
    assert_type(note(Order(customer="ada", total=1)), int)
    oops(Message.__new__(Message), ValueError())
    assert_type(bill(Order(customer="ada", total=1), Message.__new__(Message)), bool)
