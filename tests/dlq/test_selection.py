"""Selecting dead letters by their fields, and replaying the selected ones at a rate."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest

from rsmq.dlq import DeadLetter, DeadLetters, Selection, read_fields
from rsmq.errors import ConfigError
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.topics import Topic, Topics

GROUP = "billing"
DIED = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATER = timedelta(microseconds=1)


def letter(
    data: bytes | None = b'{"shop": 7, "who": {"tier": "gold", "tags": ["a", "b"]}, "a.b": "dot"}',
) -> DeadLetter:
    """A dead letter with all fields set."""
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
def test_selection_matches_fields_of_the_dead_letter(selection: Selection, is_meant: bool) -> None:
    """Each condition alone, and all of them together."""
    assert selection.matches(letter()) is is_meant


FIELDS = [
    ("shop=7", True), ("shop=8", False), ("shop=seven", False), ("shop!=8", True), ("shop!=7", False),
    ("who.tier=gold", True), ("who.tags.1=b", True), ("who.tags.2=b", False), ("who.tags.2!=b", True),
    ("a.b=dot", True), ("nothing=7", False), ("nothing!=7", True), ("who.tier.more=x", False), ("shop=true", False),
]  # fmt: skip


@pytest.mark.parametrize(("text", "is_meant"), FIELDS)
def test_selection_matches_fields_of_the_payload(text: str, is_meant: bool) -> None:
    """Fields are found by their path and compared by value, text without quotes."""
    assert Selection(where=read_fields([text])).matches(letter()) is is_meant


@pytest.mark.parametrize("data", [None, b"", b"no json", b"\xff", b"[" * 100_000, b"7", b"null"])
def test_payload_without_fields_matches_only_unequal(data: bytes | None) -> None:
    """A payload that is not JSON has no fields: no condition selects it, and it is no error."""
    assert not Selection(where=read_fields(["shop=7"])).matches(letter(data))


@pytest.mark.parametrize("text", ["shop", "=7", "!=7", ""])
def test_wrong_condition_is_explained(text: str) -> None:
    """The error shows a valid condition."""
    with pytest.raises(ConfigError, match="write field=value"):
        read_fields([text])


@pytest.fixture
async def topic(client: Client, keys: Keys, settings: Settings) -> Topic:
    """Ten dead letters in three partitions, every other one of shop 1."""
    found = await Topics(client, keys, settings).ensure("orders", 3)
    for number in range(10):
        fields: list[Any] = ["data", f'{{"n": {number}, "shop": {number % 2}}}', "dlq.reason", "attempts"]
        await client.execute_command("XADD", keys.dlq("orders", number % 3, GROUP), f"{1000 + number}-0", *fields)
    return found


async def test_replay_selected_leaves_the_rest(client: Client, keys: Keys, topic: Topic) -> None:
    """A second replay of the same selection finds nothing."""
    letters = DeadLetters(client, keys)
    wanted = Selection(where=read_fields(["shop=1"]))
    assert [each.id async for each in letters.select(topic, GROUP, wanted)] == [
        f"{number % 3}/{1000 + number}-0" for number in (1, 3, 5, 7, 9)
    ]
    assert await letters.replay_selected(topic, GROUP, wanted) == 5
    assert await letters.replay_selected(topic, GROUP, wanted) == 0
    assert await letters.count(topic, GROUP) == 5
    assert await client.execute_command("XLEN", keys.stream("orders", 1)) == 2


async def test_replay_keeps_its_rate(client: Client, keys: Keys, topic: Topic) -> None:
    """The first is replayed at once, the second would follow in an hour: a cancelled call has replayed one."""
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


async def test_replay_skips_messages_that_die_again_meanwhile(client: Client, keys: Keys, topic: Topic) -> None:
    """A replay covers the dead letters that exist when it begins."""
    letters, seen = DeadLetters(client, keys), 0
    async for _ in letters.select(topic, GROUP, Selection()):
        seen += 1
        await client.execute_command("XADD", keys.dlq("orders", seen % 3, GROUP), "*", "data", "new")
    assert seen == 10
