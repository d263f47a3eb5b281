"""Where a handler failed is in the log and in the dead letter, in every way to run a handler."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, field_validator
from tenacity import wait_fixed

import rsmq
from rsmq import Broker, Message, Reject, RetryPolicy, Settings
from rsmq.dlq import DeadLetter
from rsmq.handler.failure import MOST_BYTES
from tests.contract.witness import dies, letters_of

ONCE = RetryPolicy(max_attempts=1)
PACKAGE = Path(rsmq.__file__).parent


class Shop(BaseModel):
    """A payload whose validator has a defect."""

    name: str

    @field_validator("name")
    @classmethod
    def known(cls, name: str) -> str:
        """Fails with an error that pydantic does not know."""
        return str({}[name])


class Silent(Exception):
    """An error that refuses to say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no")


def look_up(order: Any) -> None:
    """The line that fails."""
    raise KeyError(order["shop"])


def plain(order: dict[str, str]) -> None:
    """For all ways to run a plain function."""
    look_up(order)


async def inline(order: dict[str, str]) -> None:
    """Fails without suspending."""
    look_up(order)


async def waits(order: dict[str, str]) -> None:
    """Fails after it has suspended."""
    await asyncio.sleep(0)
    look_up(order)


def payloads(orders: list[dict[str, str]]) -> None:
    """A batch of payloads."""
    look_up(orders[0])


async def inline_payloads(orders: list[dict[str, str]]) -> None:
    """A batch of payloads, without suspending."""
    look_up(orders[0])


async def later_payloads(orders: list[dict[str, str]]) -> None:
    """A batch of payloads, after it has suspended."""
    await asyncio.sleep(0)
    look_up(orders[0])


async def messages(batch: list[Message]) -> None:
    """A batch of messages."""
    look_up(json.loads(batch[0].data))


async def outcomes(batch: list[Message]) -> list[Exception | None]:
    """A batch that returns what it has caught."""
    found = list[Exception | None]()
    for message in batch:
        try:
            look_up(json.loads(message.data))
        except KeyError as error:
            found.append(error)
    return found


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """A broker on the shared server."""
    return Broker(replace(settings, preflight="warn"))


async def buried(broker: Broker, topic: str = "t", count: int = 1) -> list[DeadLetter]:
    """The dead letters of a message that is published now."""
    async with broker.running():
        for _ in range(count):
            await broker.publish(topic, {"shop": "s-7", "name": "x"}, key="k")
        await dies(broker, topic, "g", count)
        return await letters_of(broker, topic, "g")


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (inline, {}),
        (plain, {"execution": "thread"}),
        (plain, {"execution": "process"}),
        (waits, {}),
        (inline_payloads, {"batch": 10}),
        (payloads, {"batch": 10, "execution": "thread"}),
        (payloads, {"batch": 10, "execution": "process"}),
        (later_payloads, {"batch": 10}),
        (messages, {"batch": 10}),
        (outcomes, {"batch": 10}),
        (inline, {"distribution": "shared", "ordering": "none"}),
    ],
)
async def test_failed_message_has_its_traceback_in_log_and_dead_letter(
    broker: Broker, caplog: pytest.LogCaptureFixture, function: Any, options: dict[str, Any]
) -> None:
    """The line that failed is there, and no line of rsmq."""
    broker.handler("t", group="g", retry=ONCE, **options)(function)
    (letter,) = await buried(broker)
    assert (letter.reason, letter.error) == ("failed", "KeyError: 's-7'")
    assert 'in look_up\n    raise KeyError(order["shop"])\n' in letter.traceback
    assert f"in {function.__name__}\n" in letter.traceback
    assert letter.traceback.rstrip().endswith("KeyError: 's-7'")
    assert str(PACKAGE) not in letter.traceback
    (warning,) = [each for each in caplog.records if "moved to dead letters" in each.getMessage()]
    assert warning.levelname == "WARNING"
    assert "in look_up" in logging.Formatter().format(warning)


async def test_feed_has_the_traceback_of_its_function(broker: Broker) -> None:
    """`deliver` calls a function of the user, too."""
    broker.deliver("t", to=lambda order: look_up(order), group="g", payload=dict[str, str], retry=ONCE)
    (letter,) = await buried(broker)
    assert "in look_up" in letter.traceback
    assert "feed.py" not in letter.traceback


async def test_timed_out_handler_has_the_place_where_it_waited(broker: Broker) -> None:
    """A time-out without a place cannot be mended."""

    @broker.handler("t", group="g", retry=ONCE, timeout=timedelta(seconds=0.05))
    async def slow(order: dict[str, str]) -> None:
        await asyncio.Event().wait()  # the place

    (letter,) = await buried(broker)
    assert letter.reason == "timeout"
    assert "in slow\n    await asyncio.Event().wait()  # the place\n" in letter.traceback
    assert letter.traceback.endswith(f"{letter.error}\n")


async def test_each_failed_attempt_has_its_traceback_at_debug(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    """Who looks for a passing error sees each attempt; the log at info stays short."""
    caplog.set_level(logging.DEBUG, "rsmq")
    broker.handler("t", group="g", retry=RetryPolicy(max_attempts=3, wait=wait_fixed(0)))(waits)
    await buried(broker)
    with_traceback = [each for each in caplog.records if each.exc_info and each.name == "rsmq.handler"]
    assert [each.levelname for each in with_traceback] == ["DEBUG", "DEBUG", "WARNING"]
    assert all("in look_up" in logging.Formatter().format(each) for each in with_traceback)


async def test_validator_of_the_user_has_its_traceback(broker: Broker) -> None:
    """A defect in a validator is one of the user's code, though the message is malformed."""

    @broker.handler("t", group="g")
    async def handle(shop: Shop) -> None:
        raise AssertionError

    (letter,) = await buried(broker)
    assert (letter.reason, letter.error) == ("malformed", "KeyError in a validator")
    assert "in known\n    return str({}[name])\n" in letter.traceback


async def test_unreadable_payload_has_no_traceback(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    """No code of the user ran: the error says it all."""

    @broker.handler("t", group="g")
    async def handle(numbers: list[int]) -> None:
        raise AssertionError

    (letter,) = await buried(broker)
    assert (letter.reason, letter.traceback) == ("malformed", "")
    assert [each for each in caplog.records if each.exc_info] == []


@pytest.mark.parametrize(
    "error", [Silent(), ValueError("file \udcff"), Reject("\udcff" * 9999), ValueError("x" * 9999)]
)
async def test_error_with_an_impossible_text_is_a_failed_attempt_like_any_other(
    broker: Broker, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """It is kept with its traceback, within the bound, and the messages behind it are handled."""
    caplog.set_level("CRITICAL", "rsmq.handler")  # xdist cannot send a report whose log UTF-8 cannot hold

    @broker.handler("t", group="g", retry=RetryPolicy(max_attempts=2, wait=wait_fixed(0)))
    async def handle(order: dict[str, str]) -> None:
        raise error

    letters = await buried(broker, count=3)
    for letter in letters:
        assert "raise error" in letter.traceback
        assert len(letter.traceback.encode()) <= MOST_BYTES
        assert len(letter.error) <= 1000


async def test_replayed_message_has_no_field_of_its_dead_letter(broker: Broker) -> None:
    """A replay drops the traceback with the rest, so that the next failure has its own."""
    replayed: list[dict[str, str]] = []

    @broker.handler("t", group="g", retry=ONCE)
    async def handle(order: dict[str, str], message: Message) -> None:
        if replayed or message.headers:
            replayed.append(message.headers)
        look_up(order)

    async with broker.running():
        await broker.publish("t", {"shop": "s-7"}, headers={"from": "test"}, key="k")
        await dies(broker, "t", "g", 1)
        await broker.dead_letters.replay(await broker.topics.existing("t"), "g")
        await dies(broker, "t", "g", 1)
        (letter,) = await letters_of(broker, "t", "g")
    assert replayed == [{"from": "test"}] * 2
    assert letter.traceback.count("Traceback") == 1
