"""Dead letters: listed in time order at any number, replayed for one group, purged."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rsmq.dlq import DeadLetter, DeadLetters, Selection
from rsmq.errors import ConfigError
from rsmq.model.keys import Keys
from rsmq.model.packing import pack_fields
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.topics import Topic, Topics

GROUP = "billing"


class DlqTopic:
    """A topic of three partitions, and a method that buries dead letters."""

    def __init__(self, client: Client, keys: Keys, topic: Topic) -> None:
        self.client, self.keys, self.topic = client, keys, topic
        self.letters = DeadLetters(client, keys)

    async def bury(self, partition: int, *fields: str | bytes, stream_id: str = "*", **notes: Any) -> bytes:
        flat = [part for name, value in notes.items() for part in (f"dlq.{name}", value)]
        key = self.keys.dlq("orders", partition, GROUP)
        return await self.client.execute_command("XADD", key, stream_id, *fields, *flat)

    async def all(self) -> list[DeadLetter]:
        return [letter async for letter in self.letters.iterate(self.topic, GROUP)]

    async def stream(self, partition: int) -> list[list[bytes]]:
        found = await self.client.execute_command("XRANGE", self.keys.stream("orders", partition), "-", "+")
        return [fields for _, fields in found]


@pytest.fixture
async def dlq(client: Client, keys: Keys, settings: Settings) -> DlqTopic:
    """No dead letters yet."""
    return DlqTopic(client, keys, await Topics(client, keys, settings).ensure("orders", 3))


async def test_dead_letter_has_reason_error_and_original_fields(dlq: DlqTopic) -> None:
    """All fields come back in their types, from the list and by id."""
    await dlq.bury(
        2, "data", b'{"n":1}', "key", "c-42", "id", "m1", "h", '{"a":"b"}', "extra", "1", stream_id="7-3",
        reason="attempts", error="ValueError: no", attempts=5, group=GROUP, origin="5-1", at_ms=1718000000123,
        member="w1",
    )  # fmt: skip
    (letter,) = await dlq.all()
    assert letter == await dlq.letters.get(dlq.topic, GROUP, "2/7-3")
    assert letter == DeadLetter(
        id="2/7-3", topic="orders", partition=2, group=GROUP, reason="attempts", error="ValueError: no", attempts=5,
        origin="5-1", at=datetime(2024, 6, 10, 6, 13, 20, 123000, tzinfo=UTC), member="w1", data=b'{"n":1}', key="c-42",
        message_id="m1", headers={"a": "b"},
        fields=((b"data", b'{"n":1}'), (b"key", b"c-42"), (b"id", b"m1"), (b"h", b'{"a":"b"}'), (b"extra", b"1")),
    )  # fmt: skip


async def test_unreadable_dead_letter_is_listed(dlq: DlqTopic) -> None:
    """No data, broken headers, bad UTF-8, duplicate fields, no `dlq.` fields, or packed."""
    await dlq.bury(0, "h", b"\xff{", "key", b"\xff", "key", "second", stream_id="1000-0", attempts="many")
    wide = [part for number in range(1500) for part in (f"f{number}", "x")]
    await dlq.bury(0, stream_id="1001-0", packed=pack_fields(wide), reason="malformed", origin="4-4")
    first, second = await dlq.all()
    assert (first.data, first.headers, first.key, first.attempts, first.reason) == (None, {}, r"\xff", 0, "")
    assert first.fields == ((b"h", b"\xff{"), (b"key", b"\xff"), (b"key", b"second"))
    assert first.at == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert (len(second.fields), second.message_id, second.reason) == (1500, "4-4", "malformed")


async def test_dead_letters_come_in_time_order_over_all_partitions(dlq: DlqTopic) -> None:
    """They are read page by page and merged by their stream ids; `count` agrees."""
    for number in range(200):
        await dlq.bury(number * number % 3, "data", str(number), stream_id=f"{1000 + number}-0")
    assert [letter.data for letter in await dlq.all()] == [b"%d" % number for number in range(200)]
    assert await dlq.letters.count(dlq.topic, GROUP) == 200
    assert await dlq.letters.count(dlq.topic, "other") == 0
    assert [letter async for letter in dlq.letters.iterate(dlq.topic, "other")] == []


async def test_replay_by_id_leaves_the_others(dlq: DlqTopic) -> None:
    """The chosen ones move, addressed to their group; a second replay finds nothing."""
    for number in range(3):
        await dlq.bury(number, "data", str(number), stream_id="5-0", reason="attempts")
    for replayed in (2, 0):
        assert await dlq.letters.replay(dlq.topic, GROUP, ["0/5-0", "2/5-0", "1/9-9"]) == replayed
    assert await dlq.stream(0) == [[b"data", b"0", b"group", GROUP.encode()]]
    assert await dlq.stream(1) == []
    assert [letter.id for letter in await dlq.all()] == ["1/5-0"]


async def test_replay_without_ids_publishes_all(dlq: DlqTopic) -> None:
    """There is more than a page in each partition; each keeps its order."""
    for number in range(150):
        await dlq.bury(number % 3, "data", str(number))
    assert await dlq.letters.replay(dlq.topic, GROUP) == 150
    assert await dlq.letters.count(dlq.topic, GROUP) == 0
    for partition in range(3):
        assert [int(fields[1]) for fields in await dlq.stream(partition)] == list(range(partition, 150, 3))


async def test_replay_of_a_packed_entry_restores_its_fields(dlq: DlqTopic) -> None:
    """The packed fields are stored unchanged, with the group added."""
    wide = [part for number in range(5000) for part in (f"f{number}", "x")]
    await dlq.bury(1, packed=pack_fields([*wide, "group", "old"]), reason="malformed")
    assert await dlq.letters.replay(dlq.topic, GROUP) == 1
    assert await dlq.stream(1) == [[*(part.encode() for part in wide), b"group", GROUP.encode()]]
    assert await dlq.letters.count(dlq.topic, GROUP) == 0


@pytest.mark.parametrize("letter", ["", "5-0", "x/5-0", "1/", "1/5-x", "1/5-0-0"])
async def test_wrong_dead_letter_id_is_refused(dlq: DlqTopic, letter: str) -> None:
    """The error shows a valid id."""
    with pytest.raises(ConfigError, match="3/1718000000000-0"):
        await dlq.letters.replay(dlq.topic, GROUP, [letter])


async def test_purge_deletes_by_age_or_all(dlq: DlqTopic) -> None:
    """The old ones first, then the rest; messages of the topic stay."""
    for partition in range(3):
        await dlq.bury(partition, "data", "old", stream_id="5-0")
        await dlq.bury(partition, "data", "new")
    await dlq.client.execute_command("XADD", dlq.keys.stream("orders", 0), "*", "data", "x")
    assert await dlq.letters.purge(dlq.topic, GROUP, timedelta(hours=1)) == 3
    assert {letter.data for letter in await dlq.all()} == {b"new"}
    assert await dlq.letters.purge(dlq.topic, GROUP) == 3
    assert await dlq.letters.purge(dlq.topic, GROUP) == 0
    assert len(await dlq.stream(0)) == 1


async def test_name_in_place_of_a_topic_is_refused(dlq: DlqTopic) -> None:
    """Each method says what to give. So does a replay of one id that is no list."""
    name: Any = "sms"
    calls = [
        dlq.letters.count(name, GROUP), dlq.letters.get(name, GROUP, "0/1-1"), dlq.letters.replay(name, GROUP),
        dlq.letters.replay(name, GROUP, ["0/1-1"]), dlq.letters.purge(name, GROUP),
        anext(dlq.letters.iterate(name, GROUP)), anext(dlq.letters.select(name, GROUP, Selection())),
        dlq.letters.replay_selected(name, GROUP, Selection()),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ConfigError, match=r"'sms' is the name of a topic.*broker.topics.existing\('sms'\)"):
            await call
    with pytest.raises(ConfigError, match=r"give a list of ids, such as ids=\['0/1-1'\]"):
        await dlq.letters.replay(dlq.topic, GROUP, "0/1-1")
