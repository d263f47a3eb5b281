"""The harness runs a user's handlers in the test: outcomes, retries under a moved clock, assertions that can fail."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel
from tenacity import wait_fixed

from rsmq import Broker, ConfigError, Message, Reject, Retry, RetryPolicy, Settings
from rsmq.testing import Harness

HOUR = timedelta(hours=1)


class Order(BaseModel):
    """A payload."""

    n: int
    total: float = 0.0


class Shop:
    """A user's application: what it was asked to do and what it does wrong."""

    def __init__(self, **options: Any) -> None:
        self.broker = Broker(Settings(url="redis://127.0.0.1:1/0"))  # nobody listens there: only the harness may work
        self.errors: list[Exception] = []
        self.billed: list[int] = []

        @self.broker.handler("orders", group="billing", retry=RetryPolicy(3, wait_fixed(3600)), **options)
        async def bill(order: Order, message: Message) -> int:
            if self.errors:
                raise self.errors.pop(0)
            self.billed.append(order.n)
            await self.broker.publish("invoices", {"n": order.n}, key=message.key)
            return order.n

        @self.broker.handler("invoices", group="mail")
        async def mail(_invoice: dict[str, int]) -> None:
            return None


@pytest.fixture
def shop() -> Shop:
    """An application with key order."""
    return Shop()


@pytest.fixture
def harness(server_url: str, prefix: str) -> Callable[..., Harness]:
    """A harness on the shared server."""
    return lambda broker, **overrides: Harness(broker, url=server_url, prefix=prefix, **overrides)


async def test_a_message_is_handled(shop: Shop, harness: Callable[..., Harness]) -> None:
    """The outcome says that and how often it was handled; what the handler published is there, and handled too."""
    async with harness(shop.broker) as test:
        [outcome] = await test.publish_and_handle("orders", Order(n=1), key="ada")
        assert (outcome.status, outcome.attempts, outcome.result, outcome.error) == ("done", 1, 1, None)
        assert outcome.is_done
        [invoice] = await test.assert_published("invoices", {"n": 1}, key="ada")
        [mailed] = await test.outcomes("invoices", invoice.id)
        assert mailed.is_done
        await test.assert_no_dead_letters()
    assert shop.billed == [1]


@pytest.mark.parametrize("options", [{}, {"ordering": "none"}, {"distribution": "shared"}], ids=str)
async def test_the_clock_moves_retries(options: dict[str, str], harness: Callable[..., Harness]) -> None:
    """A retry in an hour is handled when the hour has been moved, not before; later ones of its key wait behind it."""
    shop, is_ordered = Shop(**options), not options
    shop.errors = [ValueError("first"), Retry("second", after=2 * HOUR)]
    async with harness(shop.broker) as test:
        [outcome] = await test.publish_and_handle("orders", Order(n=1), key="ada")
        assert (outcome.status, outcome.attempts, str(outcome.error)) == ("waiting", 1, "first")
        await test.advance(HOUR / 2)
        [outcome] = await test.outcomes("orders", outcome.message_id)
        assert outcome.attempts == 1
        await test.advance(HOUR / 2)
        [outcome] = await test.outcomes("orders", outcome.message_id)
        assert (outcome.status, outcome.attempts) == ("waiting", 2)
        [later] = await test.publish_and_handle("orders", Order(n=2), key="ada")
        assert later.is_done != is_ordered
        await test.advance(2 * HOUR)
        [outcome] = await test.outcomes("orders", outcome.message_id)
        assert (outcome.status, outcome.attempts) == ("done", 3)
        assert [run.attempt for run in outcome.runs] == [1, 2, 3]
    assert shop.billed == ([1, 2] if is_ordered else [2, 1])


async def test_the_clock_moves_delayed_messages(shop: Shop, harness: Callable[..., Harness]) -> None:
    """A delayed message is neither published nor handled before its time."""
    async with harness(shop.broker) as test:
        [outcome] = await test.publish_and_handle("orders", Order(n=1), delay=timedelta(days=1))
        assert (outcome.status, outcome.attempts) == ("waiting", 0)
        assert await test.published("orders") == []
        await test.advance(timedelta(hours=23))
        assert shop.billed == []
        await test.advance(timedelta(hours=1))
        assert shop.billed == [1]


async def test_dead_letters(shop: Shop, harness: Callable[..., Harness]) -> None:
    """What is rejected, or cannot be read, is dead, with its reason; also through all its retries."""
    shop.errors = [Reject("no such customer")]
    async with harness(shop.broker) as test:
        [outcome] = await test.publish_and_handle("orders", Order(n=1))
        assert outcome.status == "dead"
        assert outcome.dead_letter == await test.assert_dead_letter("orders", "billing", reason="rejected")
        [malformed] = await test.publish_and_handle("orders", {"n": "many"})
        assert (malformed.status, malformed.attempts) == ("dead", 0)
        shop.errors = [ValueError("always")] * 3
        [failed] = await test.publish_and_handle("orders", Order(n=3))
        for _ in range(2):
            await test.advance(HOUR)
        [failed] = await test.outcomes("orders", failed.message_id)
        assert (failed.status, failed.attempts) == ("dead", 3)
        with pytest.raises(AssertionError, match=r"there are 3 dead letters:\n  orders/billing rejected"):
            await test.assert_no_dead_letters()
        with pytest.raises(AssertionError, match=r"not one dead letter .* but 3"):
            await test.assert_dead_letter("orders", "billing", reason="rejected")


async def test_a_wrong_assertion_says_what_is_there(shop: Shop, harness: Callable[..., Harness]) -> None:
    """The message of a failed assertion shows what was published instead."""
    async with harness(shop.broker) as test:
        await test.publish_and_handle("orders", Order(n=1), key="ada")
        with pytest.raises(AssertionError, match=r"'invoices' has 0 messages \{'n': 2\}, not 1; it has:\n  \{'n': 1\}"):
            await test.assert_published("invoices", {"n": 2})
        with pytest.raises(AssertionError, match="with key 'bob'"):
            await test.assert_published("invoices", key="bob")
        assert await test.assert_published("orders", Order(n=1), key="ada")
        await test.assert_published("nowhere", count=0)


async def test_the_error_of_a_test_comes_out_as_it_is(shop: Shop, harness: Callable[..., Harness]) -> None:
    """Not in an exception group: a failed assertion is read, not searched."""
    error = AssertionError("mine")
    with pytest.raises(AssertionError) as caught:
        async with harness(shop.broker):
            raise error
    assert caught.value is error


async def test_batches(harness: Callable[..., Harness]) -> None:
    """The messages of a batch have an outcome each."""
    broker = Broker(Settings(url="redis://127.0.0.1:1/0"))

    @broker.handler("orders", group="audit", batch=10, retry=RetryPolicy(2, wait_fixed(60)))
    async def audit(orders: list[Order]) -> list[Exception | None]:
        return [ValueError("odd") if order.n % 2 else None for order in orders]

    async with harness(broker) as test:
        [even] = await test.publish_and_handle("orders", Order(n=0))
        [odd] = await test.publish_and_handle("orders", Order(n=1))
        assert (even.status, odd.status) == ("done", "waiting")
        await test.advance(timedelta(minutes=1))
        [odd] = await test.outcomes("orders", odd.message_id)
        assert (odd.status, odd.attempts, str(odd.error)) == ("dead", 2, "odd")


async def test_mistakes(shop: Shop, harness: Callable[..., Harness]) -> None:
    """A topic without handlers, a clock that goes back and a broker in use are refused with what to do."""
    async with harness(shop.broker) as test:
        with pytest.raises(ConfigError, match="no handler of this broker has the topic 'order'; it has: invoices, ord"):
            await test.publish_and_handle("order", {})
        with pytest.raises(ConfigError, match="only forward"):
            await test.advance(-HOUR)
        with pytest.raises(ConfigError, match="the broker is connected"), shop.broker.pointed_at(test.settings):
            pass


async def test_a_handler_that_never_ends(harness: Callable[..., Harness]) -> None:
    """A wait for it fails with what is in hand, instead of hanging."""
    import anyio

    broker = Broker(Settings(url="redis://127.0.0.1:1/0"))

    @broker.handler("orders", group="g")
    async def hang(_order: dict[str, int]) -> None:
        await anyio.sleep_forever()

    async with harness(broker, patience=timedelta(milliseconds=300), stop_grace=timedelta(0)) as test:
        with pytest.raises(AssertionError, match=r"still busy: orders/g has 1 in hand"):
            await test.publish_and_handle("orders", {})


async def test_the_broker_is_as_before(shop: Shop, harness: Callable[..., Harness]) -> None:
    """After the block the broker has its own settings, keys and middleware again."""
    before = (shop.broker.settings, shop.broker.keys, list(shop.broker._middlewares))
    async with harness(shop.broker):
        assert shop.broker.settings != before[0]
    assert (shop.broker.settings, shop.broker.keys, shop.broker._middlewares) == before
