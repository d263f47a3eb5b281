"""Which dead letters are meant, and how they are replayed: some of them, at a rate."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest

from rsmq.connect import Client
from rsmq.dlq import DeadLetter, DeadLetters, Selection, read_fields
from rsmq.errors import ConfigError
from rsmq.keys import Keys
from rsmq.settings import Settings
from rsmq.topic import Topic, Topics

GROUP = "billing"
DIED = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATER = timedelta(microseconds=1)


def letter(
    data: bytes | None = b'{"shop": 7, "who": {"tier": "gold", "tags": ["a", "b"]}, "a.b": "dot"}',
) -> DeadLetter:
    """One of a kind."""
    return DeadLetter("0/1-1", "orders", 0, GROUP, "attempts", "ValueError: Gateway timeout", 5, "1-1", DIED, "w",
                      data, "c-42", "m", {}, ())  # fmt: skip


MATCHES = [
    (Selection(), True),
    (Selection(reasons=("malformed", "attempts")), True),
    (Selection(reasons=("malformed",)), False),
    (Selection(error="gateway TIMEOUT"), True),
    (Selection(error="refused"), False),
    (Selection(since=DIED), True),
    (Selection(since=DIED + LATER), False),
    (Selection(until=DIED), False),
    (Selection(until=DIED + LATER), True),
    (Selection(key="c-42"), True),
    (Selection(key="c-4"), False),
    (Selection(reasons=("attempts",), key="other"), False),
]


@pytest.mark.parametrize(("selection", "is_meant"), MATCHES)
def test_what_a_letter_says(selection: Selection, is_meant: bool) -> None:
    """Each condition alone, and all of them together."""
    assert selection.matches(letter()) is is_meant


FIELDS = [
    ("shop=7", True), ("shop=8", False), ("shop=seven", False), ("shop!=8", True), ("shop!=7", False),
    ("who.tier=gold", True), ("who.tags.1=b", True), ("who.tags.2=b", False), ("who.tags.2!=b", True),
    ("a.b=dot", True), ("nothing=7", False), ("nothing!=7", True), ("who.tier.more=x", False), ("shop=true", False),
]  # fmt: skip


@pytest.mark.parametrize(("text", "is_meant"), FIELDS)
def test_what_a_payload_says(text: str, is_meant: bool) -> None:
    """Fields are found by their path and compared by value, text without quotes."""
    assert Selection(where=read_fields([text])).matches(letter()) is is_meant


@pytest.mark.parametrize("data", [None, b"", b"no json", b"\xff", b"[" * 100_000, b"7", b"null"])
def test_a_payload_without_fields(data: bytes | None) -> None:
    """What is no JSON has no fields; neither condition is met by it, nor is it an error."""
    assert not Selection(where=read_fields(["shop=7"])).matches(letter(data))


@pytest.mark.parametrize("text", ["shop", "=7", "!=7", ""])
def test_a_wrong_condition_is_explained(text: str) -> None:
    """The error shows what one looks like."""
    with pytest.raises(ConfigError, match="write field=value"):
        read_fields([text])


@pytest.fixture
async def topic(client: Client, keys: Keys, settings: Settings) -> Topic:
    """Ten dead letters in three partitions, every other one of them of shop 1."""
    found = await Topics(client, keys, settings).ensure("orders", 3)
    for number in range(10):
        fields: list[Any] = ["data", f'{{"n": {number}, "shop": {number % 2}}}', "dlq.reason", "attempts"]
        await client.execute_command("XADD", keys.dlq("orders", number % 3, GROUP), f"{1000 + number}-0", *fields)
    return found


async def test_a_selection_is_replayed_and_the_rest_stays(client: Client, keys: Keys, topic: Topic) -> None:
    """Only those that are meant move, once."""
    letters = DeadLetters(client, keys)
    wanted = Selection(where=read_fields(["shop=1"]))
    assert [each.id async for each in letters.select(topic, GROUP, wanted)] == [
        f"{number % 3}/{1000 + number}-0" for number in (1, 3, 5, 7, 9)
    ]
    assert await letters.replay_selected(topic, GROUP, wanted) == 5
    assert await letters.replay_selected(topic, GROUP, wanted) == 0
    assert await letters.count(topic, GROUP) == 5
    assert await client.execute_command("XLEN", keys.stream("orders", 1)) == 2


async def test_a_rate_is_kept(client: Client, keys: Keys, topic: Topic) -> None:
    """The first goes at once, the second in an hour: whoever breaks it off finds one replayed."""
    letters = DeadLetters(client, keys)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def replay() -> None:
                await letters.replay(topic, GROUP, every=timedelta(hours=1))

            tasks.start_soon(replay)
            with anyio.fail_after(30):
                while await letters.count(topic, GROUP) == 10:
                    await anyio.sleep(0.01)
            scope.cancel()
    assert await letters.count(topic, GROUP) == 9


async def test_what_dies_again_meanwhile_is_not_replayed_twice(client: Client, keys: Keys, topic: Topic) -> None:
    """A selection is of what exists when it begins."""
    letters, seen = DeadLetters(client, keys), 0
    async for _ in letters.select(topic, GROUP, Selection()):
        seen += 1
        await client.execute_command("XADD", keys.dlq("orders", seen % 3, GROUP), "*", "data", "new")
    assert seen == 10
