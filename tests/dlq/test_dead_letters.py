"""Dead letters: listed in time order however many there are, replayed for one group, purged."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rsmq.connect import Client
from rsmq.dlq import DeadLetter, DeadLetters
from rsmq.errors import ConfigError
from rsmq.keys import Keys
from rsmq.message import pack_fields
from rsmq.settings import Settings
from rsmq.topic import Topic, Topics

GROUP = "billing"


class Graveyard:
    """A topic of three partitions with dead letters that a test buries as it likes."""

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
async def graveyard(client: Client, keys: Keys, settings: Settings) -> Graveyard:
    """No dead letters yet."""
    return Graveyard(client, keys, await Topics(client, keys, settings).ensure("orders", 3))


async def test_a_dead_letter_says_everything(graveyard: Graveyard) -> None:
    """Original fields and the reasons come back in their types, from the list and by id."""
    await graveyard.bury(
        2, "data", b'{"n":1}', "key", "c-42", "id", "m1", "h", '{"a":"b"}', "extra", "1", stream_id="7-3",
        reason="attempts", error="ValueError: no", attempts=5, group=GROUP, origin="5-1", at_ms=1718000000123,
        member="w1",
    )  # fmt: skip
    (letter,) = await graveyard.all()
    assert letter == await graveyard.letters.get(graveyard.topic, GROUP, "2/7-3")
    assert letter == DeadLetter(
        id="2/7-3", topic="orders", partition=2, group=GROUP, reason="attempts", error="ValueError: no", attempts=5,
        origin="5-1", at=datetime(2024, 6, 10, 6, 13, 20, 123000, tzinfo=UTC), member="w1", data=b'{"n":1}', key="c-42",
        message_id="m1", headers={"a": "b"},
        fields=((b"data", b'{"n":1}'), (b"key", b"c-42"), (b"id", b"m1"), (b"h", b'{"a":"b"}'), (b"extra", b"1")),
    )  # fmt: skip


async def test_an_unreadable_dead_letter_is_shown_all_the_same(graveyard: Graveyard) -> None:
    """It may be dead because nobody can read it: no data, broken headers, bad UTF-8, duplicates, no notes, packed."""
    await graveyard.bury(0, "h", b"\xff{", "key", b"\xff", "key", "second", stream_id="1000-0", attempts="many")
    wide = [part for number in range(1500) for part in (f"f{number}", "x")]
    await graveyard.bury(0, stream_id="1001-0", packed=pack_fields(wide), reason="malformed", origin="4-4")
    first, second = await graveyard.all()
    assert (first.data, first.headers, first.key, first.attempts, first.reason) == (None, {}, r"\xff", 0, "")
    assert first.fields == ((b"h", b"\xff{"), (b"key", b"\xff"), (b"key", b"second"))
    assert first.at == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert (len(second.fields), second.message_id, second.reason) == (1500, "4-4", "malformed")


async def test_they_come_in_time_order_over_all_partitions(graveyard: Graveyard) -> None:
    """Page by page, merged by the time of death; count agrees."""
    for number in range(200):
        await graveyard.bury(number * number % 3, "data", str(number), stream_id=f"{1000 + number}-0")
    assert [letter.data for letter in await graveyard.all()] == [b"%d" % number for number in range(200)]
    assert await graveyard.letters.count(graveyard.topic, GROUP) == 200
    assert await graveyard.letters.count(graveyard.topic, "other") == 0
    assert [letter async for letter in graveyard.letters.iterate(graveyard.topic, "other")] == []


async def test_replay_by_id(graveyard: Graveyard) -> None:
    """Only the chosen ones move, addressed to their group; a second time there is nothing to replay."""
    for number in range(3):
        await graveyard.bury(number, "data", str(number), stream_id="5-0", reason="attempts")
    for replayed in (2, 0):
        assert await graveyard.letters.replay(graveyard.topic, GROUP, ["0/5-0", "2/5-0", "1/9-9"]) == replayed
    assert await graveyard.stream(0) == [[b"data", b"0", b"group", GROUP.encode()]]
    assert await graveyard.stream(1) == []
    assert [letter.id for letter in await graveyard.all()] == ["1/5-0"]


async def test_replay_of_all(graveyard: Graveyard) -> None:
    """More than a page of each partition, in their order."""
    for number in range(150):
        await graveyard.bury(number % 3, "data", str(number))
    assert await graveyard.letters.replay(graveyard.topic, GROUP) == 150
    assert await graveyard.letters.count(graveyard.topic, GROUP) == 0
    for partition in range(3):
        assert [int(fields[1]) for fields in await graveyard.stream(partition)] == list(range(partition, 150, 3))


async def test_replay_of_one_too_wide_for_a_script(graveyard: Graveyard) -> None:
    """The packed fields are stored as they were, with a new address."""
    wide = [part for number in range(5000) for part in (f"f{number}", "x")]
    await graveyard.bury(1, packed=pack_fields([*wide, "group", "old"]), reason="malformed")
    assert await graveyard.letters.replay(graveyard.topic, GROUP) == 1
    assert await graveyard.stream(1) == [[*(part.encode() for part in wide), b"group", GROUP.encode()]]
    assert await graveyard.letters.count(graveyard.topic, GROUP) == 0


@pytest.mark.parametrize("letter", ["", "5-0", "x/5-0", "1/", "1/5-x", "1/5-0-0"])
async def test_a_wrong_id_is_refused(graveyard: Graveyard, letter: str) -> None:
    """The error shows what an id looks like."""
    with pytest.raises(ConfigError, match="3/1718000000000-0"):
        await graveyard.letters.replay(graveyard.topic, GROUP, [letter])


async def test_purge_by_age_and_of_all(graveyard: Graveyard) -> None:
    """Old ones first, then the rest; a message is never touched."""
    for partition in range(3):
        await graveyard.bury(partition, "data", "old", stream_id="5-0")
        await graveyard.bury(partition, "data", "new")
    await graveyard.client.execute_command("XADD", graveyard.keys.stream("orders", 0), "*", "data", "x")
    assert await graveyard.letters.purge(graveyard.topic, GROUP, timedelta(hours=1)) == 3
    assert {letter.data for letter in await graveyard.all()} == {b"new"}
    assert await graveyard.letters.purge(graveyard.topic, GROUP) == 3
    assert await graveyard.letters.purge(graveyard.topic, GROUP) == 0
    assert len(await graveyard.stream(0)) == 1
