"""The harness runs a user's handlers in the test: outcomes, retries under a moved clock, and assertions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from pydantic import BaseModel
from tenacity import wait_fixed

from rsmq import (
    Breaker,
    Broker,
    Concurrency,
    ConfigError,
    Hold,
    Message,
    QuietHours,
    Rate,
    Reject,
    Retry,
    RetryPolicy,
    Settings,
)
from rsmq.broker.broker import pointed_at
from rsmq.consumer.running.runner import Runner
from rsmq.consumer.waiting.lane import Lane
from rsmq.testing import Harness, HarnessFixture
from tests.patience import until

HOUR = timedelta(hours=1)


class Order(BaseModel):
    """A payload."""

    n: int
    total: float = 0.0


class Shop:
    """A user's application: `errors` are raised by its next calls, `billed` are the handled orders."""

    def __init__(self, **options: Any) -> None:
        self.broker = Broker(Settings(url="redis://127.0.0.1:1/0"))  # no server there: only the harness may be used
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
    """An application whose handlers keep the key order."""
    return Shop()


@pytest.fixture
def harness(server_url: str, prefix: str) -> Callable[..., Harness]:
    """A harness on the shared server."""
    return lambda broker, **overrides: Harness(broker, url=server_url, prefix=prefix, **overrides)


async def test_published_message_is_handled(shop: Shop, harness: Callable[..., Harness]) -> None:
    """The outcome has status and attempts; the message that the handler published is handled, too."""
    async with harness(shop.broker) as test:
        [outcome] = await test.publish_and_handle("orders", Order(n=1), key="ada")
        assert (outcome.status, outcome.attempts, outcome.result, outcome.error) == ("done", 1, 1, None)
        assert outcome.is_done
        [invoice] = await test.assert_published("invoices", {"n": 1}, key="ada")
        [mailed] = await test.outcomes("invoices", invoice.id)
        assert mailed.is_done
        await test.assert_no_dead_letters()
    assert shop.billed == [1]


async def test_outcome_lists_the_outputs_of_its_message(harness: Callable[..., Harness]) -> None:
    """Those that were stored with the settlement, and none of a failed run."""
    broker, errors = Broker(), list[Exception]([Retry("x", after=HOUR)])

    @broker.handler("orders", group="billing")
    async def bill(order: Order, message: Message) -> None:
        await message.publish("invoices", order, key="k", headers={"a": "b"})
        if errors:
            raise errors.pop()

    async with harness(broker) as running:
        (outcome,) = await running.publish_and_handle("orders", Order(n=1))
        assert outcome.outputs == ()
        await running.advance(HOUR)
        (outcome,) = await running.outcomes("orders", outcome.message_id)
        (output,) = outcome.outputs
        assert (output.topic, output.payload, output.key) == ("invoices", {"n": 1, "total": 0.0}, "k")
        assert output.headers == {"a": "b"}
        (message,) = await running.assert_published("invoices", key="k")
        assert message.id == output.message_id


async def test_outcome_says_where_a_message_was_handed_on(harness: Callable[..., Harness]) -> None:
    """The message in the fallback topic has outcomes of its own."""
    broker = Broker()

    @broker.handler("push", group="sender", fallback="sms")
    async def push(_: Order) -> None:
        raise Reject("no device")

    @broker.handler("sms", group="sender")
    async def sms(order: Order) -> int:
        return order.n

    async with harness(broker) as running:
        (outcome,) = await running.publish_and_handle("push", Order(n=7), key="k")
        assert (outcome.status, outcome.attempts, outcome.dead_letter) == ("handed_on", 1, None)
        assert outcome.fallback is not None
        assert (outcome.fallback.topic, outcome.fallback.reason) == ("sms", "rejected")
        (other,) = await running.outcomes("sms", outcome.fallback.message_id)
        assert (other.status, other.result, other.fallback) == ("done", 7, None)
        await running.assert_no_dead_letters()


@pytest.mark.parametrize("options", [{}, {"ordering": "none"}, {"distribution": "shared"}], ids=str)
async def test_advance_moves_retries(options: dict[str, str], harness: Callable[..., Harness]) -> None:
    """A retry in an hour is handled after moving the clock by an hour; later messages of its key wait for it."""
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


async def test_advance_moves_delayed_messages(shop: Shop, harness: Callable[..., Harness]) -> None:
    """A delayed message is neither published nor handled before it is due."""
    async with harness(shop.broker) as test:
        [outcome] = await test.publish_and_handle("orders", Order(n=1), delay=timedelta(days=1))
        assert (outcome.status, outcome.attempts) == ("waiting", 0)
        assert await test.published("orders") == []
        await test.advance(timedelta(hours=23))
        assert shop.billed == []
        await test.advance(timedelta(hours=1))
        assert shop.billed == [1]


async def test_rejected_malformed_and_failed_messages_become_dead_letters(
    shop: Shop, harness: Callable[..., Harness]
) -> None:
    """Each dead letter has its reason; a failing message becomes one after its last retry."""
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


async def test_failed_assertion_lists_what_was_published(shop: Shop, harness: Callable[..., Harness]) -> None:
    """The error of a failed assertion shows what was published instead."""
    async with harness(shop.broker) as test:
        await test.publish_and_handle("orders", Order(n=1), key="ada")
        with pytest.raises(AssertionError, match=r"'invoices' has 0 messages \{'n': 2\}, not 1; it has:\n  \{'n': 1\}"):
            await test.assert_published("invoices", {"n": 2})
        with pytest.raises(AssertionError, match="with key 'bob'"):
            await test.assert_published("invoices", key="bob")
        assert await test.assert_published("orders", Order(n=1), key="ada")
        await test.assert_published("nowhere", count=0)


async def test_error_of_the_test_is_raised_unwrapped(shop: Shop, harness: Callable[..., Harness]) -> None:
    """The error is not wrapped in an exception group."""
    error = AssertionError("mine")
    with pytest.raises(AssertionError) as caught:
        async with harness(shop.broker):
            raise error
    assert caught.value is error


async def test_batch_handler_gives_one_outcome_per_message(harness: Callable[..., Harness]) -> None:
    """Each message of a batch has its own outcome."""
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


async def test_wrong_use_of_the_harness_is_refused(shop: Shop, harness: Callable[..., Harness]) -> None:
    """A topic without handlers, moving the clock back and a connected broker raise ConfigError with advice."""
    async with harness(shop.broker) as test:
        with pytest.raises(ConfigError, match="no handler of this broker has the topic 'order'; it has: invoices, ord"):
            await test.publish_and_handle("order", {})
        with pytest.raises(ConfigError, match="only forward"):
            await test.advance(-HOUR)
        with pytest.raises(ConfigError, match="the broker is connected"), pointed_at(shop.broker, test.settings):
            pass


async def test_handler_that_never_ends_fails_the_wait(harness: Callable[..., Harness]) -> None:
    """The wait fails and lists the messages in flight."""
    import anyio

    broker = Broker(Settings(url="redis://127.0.0.1:1/0"))

    @broker.handler("orders", group="g")
    async def hang(_order: dict[str, int]) -> None:
        await anyio.sleep_forever()

    async with harness(broker, patience=timedelta(milliseconds=300), stop_grace=timedelta(0)) as test:
        with pytest.raises(AssertionError, match=r"still busy: orders/g has 1 in flight"):
            await test.publish_and_handle("orders", {})


async def test_broker_is_restored_after_the_block(shop: Shop, harness: Callable[..., Harness]) -> None:
    """After the block the broker has its own settings, keys and middleware again."""
    before = (shop.broker.settings, shop.broker.keys, list(shop.broker._middlewares))
    async with harness(shop.broker):
        assert shop.broker.settings != before[0]
    assert (shop.broker.settings, shop.broker.keys, shop.broker._middlewares) == before


async def test_tenants_take_turns_in_a_harness(harness: Callable[..., Harness]) -> None:
    """Its worker is a real one: order, weights and limits are those of production."""
    broker, served = Broker(Settings(url="redis://127.0.0.1:1/0", partitions=1)), list[str]()
    gate = asyncio.Event()

    @broker.handler("t", group="g", concurrency=1, tenant=lambda message: message.headers["tenant"])
    async def handle(_order: dict[str, int], message: Message) -> None:
        await gate.wait()
        served.append(message.headers["tenant"])

    async with harness(broker) as tested:
        for tenant, count in (("noisy", 30), ("quiet", 3)):
            await broker.publish_many("t", [{"n": n} for n in range(count)], headers={"tenant": tenant})
        (consumer,) = tested._consumers
        await until(lambda: consumer.queue.tenants(consumer.lanes.values())["quiet"] == 3, "all of it is read")
        gate.set()
        await tested.handle()
    assert "".join(tenant[0] for tenant in served[1:7]) in ("qnqnqn", "nqnqnq")


RATES: dict[str, Any] = {
    "over all": Rate(5, per="1m"),
    "by key": Rate(5, per="1m", by="key"),
    "by a function": Rate(5, per="1m", by=lambda _: "x"),
    "two": [Rate(5, per="1m", by=lambda _: "x"), Rate(9, per="1m", by="key")],
    "even": Rate(5, per="1m", burst=5),
    "by cost": Rate(10, per="1m", cost=lambda _: 2),
}


@pytest.mark.parametrize("kind", RATES)
async def test_advance_moves_rates(harness: Callable[..., Harness], kind: str) -> None:
    """What waits for a rate is idle until the clock is moved; one message is always handled."""
    broker, done = Broker(), list[str]()

    @broker.handler("t", group="g", rate=RATES[kind])
    async def handle(x: str) -> None:
        done.append(x)

    async with harness(broker) as test:
        (outcome,) = await test.publish_and_handle("t", "first", key="a")
        assert outcome.is_done
        await broker.publish_many("t", [str(n) for n in range(8)], key=lambda _: "a")
        await test.handle()
        assert len(done) == 5
        await test.advance("1m")
        assert len(done) == 9


@pytest.mark.parametrize("limits", [Rate(5, per="1m"), [Rate(5, per="1m"), Concurrency(3)]], ids=["rate", "calls"])
@pytest.mark.parametrize("options", [{}, {"concurrency": 4}, {"ordering": "none"}], ids=["keys", "slots", "none"])
async def test_advance_moves_permits(harness: Callable[..., Harness], limits: Any, options: dict[str, Any]) -> None:
    """A handler that waits for a permit is idle until the clock is moved; retries and delayed messages go on."""
    broker, done = Broker(), list[str]()

    @broker.handler("t", group="g", permits={"twilio": limits}, retry=RetryPolicy(2, wait_fixed(10)), **options)
    async def handle(x: str, message: Message) -> None:
        if x == "retry" and message.attempt == 1:
            raise ValueError(x)
        if x not in ("retry", "delayed"):
            async with message.permit("twilio"):
                pass
        done.append(x)

    async with harness(broker, patience="5s") as test:
        await broker.publish("t", "retry", key="other")
        await broker.publish("t", "delayed", key="third", delay="10s")
        await test.handle()
        await broker.publish_many("t", [str(n) for n in range(12)], key=lambda n: f"k{int(n) % 6}")
        await test.handle()
        assert len(done) == 5
        await test.advance("20s")
        if "concurrency" not in options:  # there all slots wait
            assert {*done} >= {"retry", "delayed"}
        assert sum(each.isdigit() for each in done) == 5
        await test.advance("40s")
        assert sum(each.isdigit() for each in done) == 10
        await test.advance("1m")
        assert sorted(done) == sorted([*map(str, range(12)), "retry", "delayed"])
        if options.get("ordering") != "none":
            assert [each for each in done if each in ("0", "6")] == ["0", "6"]


async def test_retry_that_is_about_to_run_beside_waiting_permits_is_work(
    harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has taken it for started, and its handler does not run yet: that was taken for idle."""
    broker, done, start = Broker(), list[str](), Runner.start

    async def slow_start(runner: Runner, message: Message, lane: Lane) -> bool:
        is_ours = await start(runner, message, lane)
        await anyio.sleep(0.2)
        return is_ours

    monkeypatch.setattr(Runner, "start", slow_start)
    permits = {"twilio": Rate(1, per="1m")}

    @broker.handler("t", group="g", permits=permits, retry=RetryPolicy(2, wait_fixed(10)), ordering="none")
    async def handle(x: str, message: Message) -> None:
        if x == "retry" and message.attempt == 1:
            raise ValueError(x)
        if x != "retry":
            async with message.permit("twilio"):
                pass
        done.append(x)

    async with harness(broker, patience="5s") as test:
        await test.publish_and_handle("t", "retry")
        await broker.publish_many("t", ["one", "other"])
        await test.handle()
        assert done in (["one"], ["other"])  # of two partitions: which comes first is not promised
        await test.advance("20s")
        assert done[1:] == ["retry"]


async def test_advance_moves_quiet_hours(harness: Callable[..., Harness]) -> None:
    """What waits for their end is no work, and is handled behind it; a retry waits for it, too."""
    broker, seen, now = Broker(), list[tuple[str, int]](), datetime.now(UTC)
    quiet = QuietHours((now - HOUR).strftime("%H:%M"), (now + HOUR).strftime("%H:%M"), default="UTC")

    @broker.handler("sms", group="sender", when=quiet, retry=RetryPolicy(max_attempts=2, wait=wait_fixed(60)))
    async def send(text: str, message: Message) -> None:
        seen.append((text, message.attempt))
        if text == "bad" and message.attempt == 1:
            raise OSError("not now")

    async with harness(broker) as test:
        await broker.publish("sms", "good", key="ada")
        await broker.publish("sms", "bad", key="bob")
        await broker.publish("sms", "later", key="bob")
        await test.handle()
        await test.advance("30m")
        assert seen == []
        await test.advance("31m")
        assert sorted(seen) == [("bad", 1), ("good", 1)]
        await test.advance(22.5 * HOUR)  # it is quiet again
        assert len(seen) == 2
        await test.advance(2 * HOUR)
        assert sorted(seen) == [("bad", 1), ("bad", 2), ("good", 1), ("later", 1)]


async def test_advance_moves_the_window_of_a_digest(harness: Callable[..., Harness]) -> None:
    """The call comes when the window of its key is over, with what was collected, and its output is handled."""
    broker, calls = Broker(), list[list[str]]()

    @broker.handler("comments", group="mail", batch=10, by="key", linger="10m", output="mails")
    async def digest(comments: list[str]) -> list[str | None]:
        calls.append(comments)
        return [comments[0], *[None] * (len(comments) - 1)]

    async with harness(broker) as test:
        [first] = await test.publish_and_handle("comments", "nice", key="ada")
        await test.publish_and_handle("comments", "very nice", key="ada")
        await test.advance("9m")
        assert (first.status, calls) == ("waiting", [])
        await test.advance("1m")
        assert calls == [["nice", "very nice"]]
        await test.assert_published("mails", "nice", key="ada")


async def test_advance_moves_holds_and_breakers(harness: Callable[..., Harness]) -> None:
    """Nothing of a held name starts before its end; then a breaker lets one message try it."""
    broker, calls, says = Broker(), list[str](), list[Exception]()

    @broker.handler(
        "t", group="g", breaker=Breaker(2, "10m", by=lambda _: "x"), concurrency=1,
        retry=RetryPolicy(max_attempts=9, wait=wait_fixed(1)),
    )  # fmt: skip
    async def handle(x: str) -> None:
        calls.append(x)
        if says:
            raise says.pop(0)

    async with harness(broker) as test:
        says += [Hold("5m")]
        await test.publish_and_handle("t", "a", key="a")
        await test.publish_and_handle("t", "b", key="b")
        assert calls == ["a"]
        await test.advance("4m")
        assert calls == ["a"]
        says += [OSError(), OSError(), OSError()]
        await test.advance("1m")
        assert len(calls) == 3, "both have failed, and the breaker is open"
        await test.advance("9m")
        assert len(calls) == 3
        await test.advance("1m")
        assert len(calls) == 4, "one has tried it, and has failed"
        await test.advance("10m")
        assert len(calls) == 6, "one has tried it, and the other one has followed"


async def test_the_clock_moves_what_expires(rsmq_harness: HarnessFixture) -> None:
    """A message that waits for its retry, and one that is delayed."""
    broker, seen = Broker(), list[int]()

    @broker.handler("t", group="g", partitions=1)
    async def handle(n: int) -> None:
        seen.append(n)
        raise Retry("later", after="1h")

    async with rsmq_harness(broker) as test:
        [outcome] = await test.publish_and_handle("t", 1, key="a", expires="10m", on_expiry="dead")
        late = await broker.publish("t", 2, key="b", delay="1h", expires="70m", on_expiry="dead")
        assert outcome.status == "waiting"
        await test.advance("2h")
        outcomes = [*await test.outcomes("t", outcome.message_id), *await test.outcomes("t", late)]
        assert [each.dead_letter.reason for each in outcomes if each.dead_letter] == ["expired", "expired"]
    assert seen == [1]


async def test_outcome_of_a_message_that_is_dropped_or_cancelled_says_so(rsmq_harness: HarnessFixture) -> None:
    """It does not wait: no advance handles it. Delayed, behind a retry of its own, and delivered."""
    broker = Broker()

    @broker.handler("t", group="g", partitions=1)
    async def handle(n: int) -> None:
        raise Retry("later", after="1h")

    async with rsmq_harness(broker) as test:
        delayed = await broker.publish("t", 1, key="a", delay="1h", expires="70m")
        [parked] = await test.publish_and_handle("t", 2, key="b", expires="10m")
        refs = [await broker.publish("t", 3, key="c", delay="5h"), await broker.publish("t", 4, key="d")]
        await test.handle()
        for ref in refs:
            await broker.cancel(ref)
        await test.advance("2h")
        found = [await test.outcomes("t", each) for each in (delayed, parked.message_id, *refs)]
        assert [each.status for [each] in found] == ["expired", "expired", "cancelled", "cancelled"]


async def test_tick_goes_to_the_band_of_its_schedule(rsmq_harness: HarnessFixture) -> None:
    """As a worker would publish it."""
    broker, seen = Broker(), list[str | None]()
    topic = broker.topic("t", int, bands=("urgent", "normal"))

    @topic.handler(group="g")
    async def handle(n: int, message: Message) -> None:
        seen.append(message.band)

    @broker.every("1h", "t", band="urgent")
    def clock() -> int:
        return 1

    async with rsmq_harness(broker) as test:
        await test.tick("clock", datetime(2026, 1, 1, tzinfo=UTC))
    assert seen == ["urgent"]
