"""Wrong arguments are refused before anything is stored, with an error that says what to do instead."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rsmq import Broker, Settings
from rsmq.errors import ConfigError, RsmqError, TooLarge
from rsmq.persistence.session import poll_seconds


@pytest.fixture
async def broker(settings: Settings, no_task_left: None) -> AsyncIterator[Broker]:
    """A connected broker."""
    async with Broker(replace(settings, preflight="warn")) as connected:
        yield connected


async def nothing_is_stored(broker: Broker) -> bool:
    """Whether the server knows no device."""
    return [name async for name in broker.devices.names()] == []


@pytest.mark.parametrize("window", [0, -1, 32_768, True, None, "5", 1.5])
async def test_window_out_of_range_is_refused(broker: Broker, window: Any) -> None:
    """It is a whole number from one to half of all packet ids."""
    with pytest.raises(ConfigError, match="use 1 to 32767"):
        async with broker.connect("phone", window=window):
            raise AssertionError("it was opened")


@pytest.mark.parametrize("expires", [timedelta(0), timedelta(seconds=-1), timedelta(days=60_000), 5, "5", "0s"])
async def test_expiry_out_of_range_is_refused(broker: Broker, expires: Any) -> None:
    """It is a timedelta above 0, not a number."""
    for attempt in (
        lambda: broker.send("phone", 1, expires=expires),
        lambda: broker.send_many([("phone", 1)], expires=expires),
    ):
        with pytest.raises(ConfigError, match=r"expires=.*(a duration above 0|has no unit)"):
            await attempt()
    with pytest.raises(ConfigError, match=r"expires=.*(a duration above 0|has no unit)"):
        broker.deliver("alerts", to=lambda alert: "phone", expires=expires)
    assert await nothing_is_stored(broker)


async def test_letter_with_oversized_fields_is_refused(broker: Broker) -> None:
    """Headers that are not text, a topic that is too long, a payload above the limit: nothing is stored."""
    with pytest.raises(ConfigError, match="must be str"):
        await broker.send("phone", 1, headers={"a": 1})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="use at most 255"):
        await broker.send("phone", 1, topic="x" * 256)
    with pytest.raises(ConfigError, match="use at most 32768"):
        await broker.send("phone", 1, headers={"a": "x" * 70_000})
    with pytest.raises(TooLarge):
        await broker.send("phone", b"x" * (256 * 1024 + 1))
    assert await nothing_is_stored(broker)


@pytest.mark.parametrize("letters", [[("phone",)], [1], ["ab"], 5, {"phone": 1}])
async def test_send_many_without_pairs_is_refused(broker: Broker, letters: Any) -> None:
    """`send_many` takes pairs of a client id and a payload."""
    with pytest.raises(ConfigError, match="pair"):
        await broker.send_many(letters)
    assert await nothing_is_stored(broker)


async def test_send_many_of_nothing_stores_nothing(broker: Broker) -> None:
    """An empty list is no error."""
    await broker.send_many([])
    assert await nothing_is_stored(broker)


async def test_send_many_with_a_bad_id_stores_what_came_before(broker: Broker) -> None:
    """A bad id ends the call; earlier letters are stored, and later calls work."""
    with pytest.raises(ConfigError, match="device id"):
        await broker.send_many([("phone", 1), ("", 2), ("phone", 3)])
    await broker.send("phone", 4)
    letters = await broker.devices.peek("phone")
    assert [letter.payload for letter in letters] == [1, 4]


async def test_devices_need_a_connected_broker(settings: Settings) -> None:
    """Before and after `async with broker` the error shows it."""
    broker = Broker(replace(settings, preflight="warn"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="async with broker"):
            await broker.send("phone", 1)
        with pytest.raises(ConfigError, match="async with broker"):
            broker.connect("phone")
        async with broker:
            pass


async def test_session_that_is_not_open_cannot_be_iterated(broker: Broker) -> None:
    """The error shows `async with broker.connect`."""
    session = broker.connect("phone")
    with pytest.raises(ConfigError, match=r"async with broker\.connect"):
        await anext(session)


@pytest.mark.parametrize("letter", [1, "1", None])
async def test_session_refuses_to_ack_other_objects(broker: Broker, letter: Any) -> None:
    """It acknowledges only letters."""
    async with broker.connect("phone") as session:
        for step in (session.ack, session.receive):
            with pytest.raises(ConfigError, match="pass one that the session has yielded"):
                await step(letter)


async def test_session_refuses_to_ack_letters_of_another_device(broker: Broker) -> None:
    """A gateway that mixes up its sessions acknowledges nothing."""
    await broker.send_many([("phone", 1), ("other", 2)])
    async with broker.connect("phone") as session, broker.connect("other") as other:
        letter = await anext(session)
        with pytest.raises(ConfigError):
            await other.ack(letter)
        await other.flush()
    assert [each.payload for each in await broker.devices.peek("other")] == [2]


@pytest.mark.parametrize("count", [0, -1, 1001])
async def test_peek_count_out_of_range_is_refused(broker: Broker, count: int) -> None:
    """It reads 1 to 1000 letters."""
    with pytest.raises(ConfigError, match="use 1 to 1000"):
        await broker.devices.peek("phone", count=count)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"inbox_limit": 65_001}, "RSMQ_INBOX_LIMIT.*65000"),
        ({"inbox_limit": 0}, "RSMQ_INBOX_LIMIT"),
        ({"inbox_ttl": timedelta(0)}, "RSMQ_INBOX_TTL"),
        ({"inbox_ttl": 5}, "RSMQ_INBOX_TTL.*text with a unit"),
        ({"inbox_poll": timedelta(0)}, "RSMQ_INBOX_POLL"),
    ],
)
def test_inbox_settings_out_of_range_are_refused(values: dict[str, Any], text: str) -> None:
    """More letters than packet ids, and impossible durations."""
    with pytest.raises(ConfigError, match=text):
        Settings(**values)


def test_idle_device_is_polled_before_it_would_be_forgotten() -> None:
    """A connected device polls three times within the inbox TTL."""
    assert poll_seconds(Settings(inbox_ttl=timedelta(seconds=9))) == 3
    assert poll_seconds(Settings()) == 30


@pytest.mark.parametrize(
    "recipients",
    [lambda: "phone", lambda one, other: "phone", "phone", None],
)
async def test_deliver_with_a_wrong_function_is_refused(broker: Broker, recipients: Any) -> None:
    """`to` takes one message."""
    with pytest.raises(ConfigError):
        broker.deliver("alerts", to=recipients)


ALL: list[Callable[[Broker], Awaitable[Any]]] = [
    lambda broker: broker.devices.find("x" * 257),
    lambda broker: broker.devices.purge(""),
    lambda broker: broker.devices.peek("\ud800"),
]


@pytest.mark.parametrize("ask", ALL)
async def test_device_commands_check_their_id(broker: Broker, ask: Callable[[Broker], Awaitable[Any]]) -> None:
    """Every command that takes an id checks it in the same way."""
    with pytest.raises(RsmqError, match="device id"):
        await ask(broker)
