"""What a handler raises is the failure of its message, whatever it is: SystemExit, KeyboardInterrupt, GeneratorExit."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Annotated, Any

import pytest
from fast_depends import Depends
from pydantic import BaseModel, field_validator
from tenacity import RetryCallState, wait_fixed

from rsmq import Broker, ConfigError, Message, Reject, Retry, RetryPolicy
from rsmq.dlq import DeadLetter
from tests.contract.witness import Witness, dies, patient, settled
from tests.patience import until

QUICK = RetryPolicy(max_attempts=3, wait=wait_fixed(0.01))
INNOCENT = range(20)


class Silent(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Unprintable(BaseException):
    """Not an Exception, and with a text that UTF-8 cannot have."""

    def __str__(self) -> str:
        return "\ud800"


ERRORS = [
    SystemExit(2), SystemExit(0), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), Silent(),
    Unprintable(), BaseExceptionGroup("two", [SystemExit(1), ValueError()]), ValueError("\ud800"),
]  # fmt: skip


def is_bad(payload: Any) -> bool:
    """Whether this message fails."""
    return bool(payload["n"] == "bad")


def plain_single(broker: Broker, error: BaseException, witness: Witness) -> None:
    """In the event loop."""

    @broker.handler("t", group="g", retry=QUICK, concurrency=2)
    async def handle(payload: dict[str, Any]) -> None:
        if is_bad(payload):
            raise error
        witness.note(payload["n"])


def suspended(broker: Broker, error: BaseException, witness: Witness) -> None:
    """In the event loop, after the handler has waited."""

    @broker.handler("t", group="g", retry=QUICK, concurrency=2)
    async def handle(payload: dict[str, Any]) -> None:
        await asyncio.sleep(0.001)
        if is_bad(payload):
            raise error
        witness.note(payload["n"])


def threaded(broker: Broker, error: BaseException, witness: Witness) -> None:
    """In a thread."""

    @broker.handler("t", group="g", retry=QUICK, concurrency=2)
    def handle(payload: dict[str, Any]) -> None:
        if is_bad(payload):
            raise error
        witness.note(payload["n"])


def batch_of_one(broker: Broker, error: BaseException, witness: Witness) -> None:
    """A batch handler that sees messages."""

    @broker.handler("t", group="g", retry=QUICK, batch=1)
    async def handle(payloads: list[dict[str, Any]], messages: list[Message]) -> None:
        if is_bad(payloads[0]):
            raise error
        witness.note(payloads[0]["n"])


def outcomes(broker: Broker, error: BaseException, witness: Witness) -> None:
    """A batch handler that returns what became of each, as from `gather(..., return_exceptions=True)`."""

    @broker.handler("t", group="g", retry=QUICK, batch=50)
    async def handle(payloads: list[dict[str, Any]]) -> list[BaseException | None]:
        for payload in payloads:
            if not is_bad(payload):
                witness.note(payload["n"])
        return [error if is_bad(payload) else None for payload in payloads]


def raw(broker: Broker, error: BaseException, witness: Witness) -> None:
    """A batch handler of payloads only."""

    @broker.handler("t", group="g", retry=QUICK, batch=1)
    async def handle(payloads: list[dict[str, Any]]) -> None:
        if is_bad(payloads[0]):
            raise error
        witness.note(payloads[0]["n"])


def dependency(broker: Broker, error: BaseException, witness: Witness) -> None:
    """A dependency raises it."""

    async def check(payload: dict[str, Any]) -> int:
        if is_bad(payload):
            raise error
        return 1

    @broker.handler("t", group="g", retry=QUICK)
    async def handle(payload: dict[str, Any], checked: Annotated[int, Depends(check)]) -> None:
        witness.note(payload["n"])


def middleware(broker: Broker, error: BaseException, witness: Witness) -> None:
    """A middleware raises it."""

    @broker.middleware
    async def check(message: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
        if is_bad(message.payload):
            raise error
        return await call_next(message)

    @broker.handler("t", group="g", retry=QUICK)
    async def handle(payload: dict[str, Any]) -> None:
        witness.note(payload["n"])


WAYS = [plain_single, suspended, threaded, batch_of_one, outcomes, raw, dependency, middleware]


@patient
async def letter_of(broker: Broker) -> DeadLetter:
    """The one dead letter of the group."""
    topic = await broker.topics.find("t")
    assert topic is not None
    (letter,) = [letter async for letter in broker.dead_letters.iterate(topic, "g")]
    return letter


async def publish(broker: Broker, bad: int = 1) -> None:
    """Innocent messages, and bad ones among them."""
    for n in [*INNOCENT[:10], *["bad"] * bad, *INNOCENT[10:]]:
        await broker.publish("t", {"n": n}, key=str(n))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_error_that_a_handler_raises_fails_its_message_only(
    broker: Broker, witness: Witness, caplog: pytest.LogCaptureFixture, way: Callable[..., None], error: BaseException
) -> None:
    """The message is retried and becomes a dead letter with the name of the error; the others are handled."""
    caplog.set_level("CRITICAL", "rsmq.handler")  # xdist cannot send a report whose log UTF-8 cannot hold
    way(broker, error, witness)
    async with broker.running():
        await publish(broker)
        await witness.sees(INNOCENT)
        assert await dies(broker, "t", "g", 1) == [("failed", b'{"n":"bad"}')]
        letter = await letter_of(broker)
    assert letter.error.split(":")[0] == type(error).__name__
    assert letter.attempts == 3


@pytest.mark.parametrize("batch", [None, 10])
async def test_validator_that_exits_makes_its_message_malformed(
    broker: Broker, witness: Witness, batch: int | None
) -> None:
    """A payload model is code of the user, too."""

    class Order(BaseModel):
        n: Any

        @field_validator("n")
        @classmethod
        def check(cls, n: Any) -> Any:
            return sys.exit(2) if n == "bad" else n

    if batch is None:

        @broker.handler("t", group="g", retry=QUICK)
        async def handle(order: Order) -> None:
            witness.note(order.n)

    else:

        @broker.handler("t", group="g", retry=QUICK, batch=batch)
        async def handle_all(orders: list[Order]) -> None:
            for order in orders:
                witness.note(order.n)

    async with broker.running():
        await publish(broker)
        await witness.sees(INNOCENT)
        assert await dies(broker, "t", "g", 1) == [("malformed", b'{"n":"bad"}')]
        assert "SystemExit" in (await letter_of(broker)).error


def broken(*_: object) -> Any:
    """A callback of a policy that raises."""
    raise ZeroDivisionError("broken policy")


def exits(*_: object) -> Any:
    """One that ends the process."""
    sys.exit(2)


def untrue(_: BaseException) -> Any:
    """One whose answer cannot be used."""

    class Answer:
        def __bool__(self) -> bool:
            raise RuntimeError("neither")

    return Answer()


def waits(seconds: Any) -> Callable[[RetryCallState], Any]:
    """A wait that returns this."""
    return lambda state: seconds


async def buries_only_the_bad_one(broker: Broker, witness: Witness, policy: RetryPolicy, ordering: Any) -> DeadLetter:
    """Serve with a handler that fails for one message; returns its dead letter."""

    @broker.handler("t", group="g", retry=policy, ordering=ordering)
    async def handle(payload: dict[str, Any]) -> None:
        if is_bad(payload):
            raise ValueError("bad")
        witness.note(payload["n"])

    async with broker.running():
        await publish(broker)
        await witness.sees(INNOCENT)
        await dies(broker, "t", "g", 1)
        return await letter_of(broker)


@pytest.mark.parametrize("ordering", ["key", "none"])
@pytest.mark.parametrize("retry_on", [broken, exits, untrue])
async def test_retry_on_that_fails_retries_the_message(
    broker: Broker, witness: Witness, caplog: pytest.LogCaptureFixture, retry_on: Any, ordering: Any
) -> None:
    """Its error is logged, and the attempts are bounded all the same."""
    policy = RetryPolicy(3, wait_fixed(0.01), retry_on)
    letter = await buries_only_the_bad_one(broker, witness, policy, ordering)
    assert (letter.attempts, letter.error) == (3, "ValueError: bad")
    assert "retry_on of a retry policy failed" in caplog.text


@pytest.mark.parametrize("ordering", ["key", "none"])
@pytest.mark.parametrize("wait", [broken, exits, waits(None), waits("x"), waits(float("nan"))])
async def test_wait_that_fails_gives_the_default_wait(
    broker: Broker, witness: Witness, caplog: pytest.LogCaptureFixture, wait: Any, ordering: Any
) -> None:
    """Its error is logged, and the message is parked like any other."""
    await buries_only_the_bad_one(broker, witness, RetryPolicy(2, wait), ordering)
    assert "wait of a retry policy failed" in caplog.text


async def test_negative_wait_retries_at_once(broker: Broker, witness: Witness) -> None:
    """The message is not earlier than now."""
    policy = RetryPolicy(3, waits(-5))  # type: ignore[arg-type]
    await buries_only_the_bad_one(broker, witness, policy, "key")


@pytest.mark.parametrize(("after", "reason"), [(5, "ConfigError"), ("soon", "ConfigError")])
async def test_retry_after_something_else_than_a_span_fails_the_message(
    broker: Broker, after: Any, reason: str
) -> None:
    """The dead letter says what to write."""

    @broker.handler("t", group="g", retry=QUICK)
    async def handle(payload: dict[str, Any]) -> None:
        raise Retry(after=after)

    async with broker.running():
        await broker.publish("t", {"n": 1})
        await dies(broker, "t", "g", 1)
        letter = await letter_of(broker)
    assert letter.error.startswith(f"{reason}: after={after!r} is not a duration: ")
    assert "write after='5s'" in letter.error


async def test_reject_with_any_reason_is_a_dead_letter(broker: Broker) -> None:
    """A reason that is no text, or has none."""

    @broker.handler("t", group="g", retry=QUICK)
    async def handle(payload: dict[str, Any]) -> None:
        raise Reject([Silent(), 17][payload["n"]])  # type: ignore[arg-type]

    async with broker.running():
        for n in range(2):
            await broker.publish("t", {"n": n}, key="a")
        assert [reason for reason, _ in await dies(broker, "t", "g", 2)] == ["rejected", "rejected"]


async def test_device_function_that_exits_fails_its_message_only(broker: Broker) -> None:
    """A feed handles batches: the other messages of the batch reach their devices."""

    def device(order: dict[str, Any]) -> str:
        return sys.exit(2) if is_bad(order) else f"d{order['n']}"

    broker.deliver("t", to=device, group="g", partitions=1, retry=QUICK)
    async with broker:
        await publish(broker)
        async with broker.running():
            assert await dies(broker, "t", "g", 1) == [("failed", b'{"n":"bad"}')]
            await settled(broker, "t")
            letter = await letter_of(broker)
            found = {each.client_id async for each in broker.devices.iterate()}
    assert letter.error == "SystemExit: 2"
    assert found == {f"d{n}" for n in INNOCENT}


async def test_schedule_that_exits_is_tried_again(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    """Its errors end neither the other schedules nor the worker."""
    calls: list[str] = []

    @broker.every(timedelta(seconds=1), "ticks")
    async def exits() -> None:
        calls.append("exits")
        sys.exit(2)

    @broker.every(timedelta(seconds=1), "ticks")
    def interrupts() -> None:
        calls.append("interrupts")
        raise KeyboardInterrupt

    @broker.every(timedelta(seconds=1), "ticks")
    async def cancels() -> None:
        calls.append("cancels")
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(30)

    async with broker.running():
        await until(
            lambda: all(calls.count(name) > 1 for name in ("exits", "interrupts", "cancels")), "all are repeated"
        )
    assert "SystemExit: 2" in caplog.text


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signal_in_a_handler_stops_the_worker(
    make_broker: Callable[..., Broker], number: int, error: type[BaseException]
) -> None:
    """What a signal handler of the application raises is no error of the handler that it interrupts."""
    broker = make_broker()
    before = signal.getsignal(number)
    if number == signal.SIGTERM:
        signal.signal(number, lambda *_: sys.exit(0))
    seen: list[int] = []

    @broker.handler("t", group="g", retry=QUICK)
    async def handle(order: dict[str, int]) -> None:
        seen.append(order["n"])
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # asyncio makes a cancellation of the first Ctrl-C

    async def serve() -> None:
        async with broker:
            await broker.publish("t", {"n": 1})
            await broker.run()

    try:
        with pytest.raises(error):
            asyncio.run(serve())
    finally:
        signal.signal(number, before)
    assert seen == [1]


@pytest.mark.parametrize(
    "options",
    [
        {"retry_on": "ValueError"}, {"retry_on": ["ValueError"]}, {"retry_on": [ValueError]}, {"retry_on": int},
        {"retry_on": (ValueError, "x")}, {"retry_on": None}, {"retry_on": lambda: True}, {"retry_on": asyncio.sleep},
        {"wait": 5}, {"wait": timedelta(seconds=5)}, {"wait": wait_fixed}, {"wait": None}, {"max_attempts": 2.5},
        {"max_attempts": True}, {"max_attempts": "3"}, {"max_attempts": 0},
    ],
)  # fmt: skip
def test_policy_that_cannot_work_is_refused(options: dict[str, Any]) -> None:
    """Where it is written, and not at the first message that fails."""
    with pytest.raises(ConfigError, match=r"is not possible: (write|use) "):
        RetryPolicy(**options)


def test_registration_that_cannot_work_is_refused(broker: Broker) -> None:
    """A middleware, lifespan or schedule that is no function, and a key that is no text."""
    every = broker.every(timedelta(seconds=1), "t", name="s")
    for register, what in [(broker.middleware, "a middleware"), (broker.lifespan, "a lifespan"), (every, "a function")]:
        with pytest.raises(ConfigError, match=f"is not {what}"):
            register("x")  # type: ignore[type-var,arg-type]
    with pytest.raises(ConfigError, match="write key='5'"):
        broker.every(timedelta(seconds=1), "t", key=5)(sys.exit)  # type: ignore[arg-type]
