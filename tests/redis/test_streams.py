"""Streams: groups are made without harm, starts mean what they say, raw replies are read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from rsmq.errors import BrokerError, ConfigError
from rsmq.model.clock import from_epoch_ms
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import (
    as_dict,
    consumers_of,
    ensure_groups,
    group_names,
    groups_of,
    join_group,
    reset_group,
    start_id,
    trim,
)
from rsmq.redis.topics import Topic, Topics


@pytest.fixture
async def topic(client: Client, keys: Keys, settings: Settings) -> Topic:
    """A topic with three partitions."""
    return await Topics(client, keys, settings).ensure("orders", 3)


async def test_ensure_groups_makes_every_partition_and_moves_nobody(client: Client, keys: Keys, topic: Topic) -> None:
    """Streams and groups are made where they are missing; a group that has read on keeps its place."""
    await ensure_groups(client, keys, topic, "billing")
    stream = keys.stream("orders", 1)
    entry = await client.execute_command("XADD", stream, "*", "data", "x")
    await client.execute_command("XREADGROUP", "GROUP", "billing", "me", "STREAMS", stream, ">")
    await ensure_groups(client, keys, topic, "billing", "$")
    assert [await group_names(client, keys, "orders", number) for number in range(3)] == [["billing"]] * 3
    assert (await groups_of(client, stream))[0]["last-delivered-id"] == entry


async def test_group_that_is_reset_while_a_member_joins_gets_the_distribution_of_that_member(
    client: Client, keys: Keys, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reset comes between the two commands of the member that joins, which ended with an error."""
    ask = client.execute_command

    async def reset_first(*command: object) -> object:
        if command[0] == "HGET":
            monkeypatch.undo()
            await reset_group(client, keys, topic, "billing", "earliest")
        return await ask(*command)

    await join_group(client, keys, topic, "billing", "shared")
    monkeypatch.setattr(client, "execute_command", reset_first)
    await join_group(client, keys, topic, "billing", "shared")
    assert client.execute_command == ask
    assert await client.execute_command("HGET", keys.group("orders", "billing"), "distribution") == b"shared"


async def test_ensure_groups_reports_what_is_wrong(client: Client, keys: Keys, topic: Topic) -> None:
    """A foreign type under a stream's key is an error, not a group that is silently missing."""
    await client.execute_command("SET", keys.stream("orders", 1), "not a stream")
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        await ensure_groups(client, keys, topic, "billing")


async def test_questions_about_what_does_not_exist(client: Client, keys: Keys) -> None:
    """A missing stream has no groups and no consumers, and that is no error."""
    stream = keys.stream("nothing", 0)
    assert await groups_of(client, stream) == []
    assert await consumers_of(client, stream, "billing") == []
    await client.execute_command("XADD", stream, "*", "data", "x")
    assert await consumers_of(client, stream, "billing") == []


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("earliest", "0"),
        ("latest", "$"),
        ("1718000000000-5", "1718000000000-5"),
        ("0", "0"),
        (datetime(2024, 6, 10, tzinfo=UTC), "1717977599999-18446744073709551615"),
        (datetime(1970, 1, 1, tzinfo=UTC), "0"),
    ],
)
def test_start_id_is_the_last_delivered_id(start: str | datetime, expected: str) -> None:
    """A start becomes the last id that counts as delivered."""
    assert start_id(start) == expected


@pytest.mark.parametrize("start", ["", "newest", "12-", "-1", "1-2-3", "9" * 21])
def test_start_id_refuses_what_it_does_not_understand(start: str) -> None:
    """The error names the forms that are understood."""
    with pytest.raises(ConfigError, match="earliest, latest, a stream id"):
        start_id(start)


async def test_a_start_by_time_includes_that_moment(client: Client, keys: Keys, topic: Topic) -> None:
    """Entries of exactly the given millisecond are delivered, earlier ones are not."""
    stream = keys.stream("orders", 0)
    for entry in ("999-7", "1000-0", "1000-1", "1001-0"):
        await client.execute_command("XADD", stream, entry, "data", "x")
    await ensure_groups(client, keys, topic, "billing", start_id(from_epoch_ms(1000)))
    reply = await client.execute_command("XREADGROUP", "GROUP", "billing", "me", "STREAMS", stream, ">")
    assert [entry for entry, _ in reply[0][1]] == [b"1000-0", b"1000-1", b"1001-0"]


async def test_pipelined_returns_errors_in_their_place(client: Client, keys: Keys) -> None:
    """One bad command does not hide the replies of the others."""
    key = keys.topic("x")
    replies = await client.pipelined([("SET", key, "1"), ("LPUSH", key, "1"), ("GET", key)])
    assert replies[0] == b"OK"
    assert isinstance(replies[1], BrokerError)
    assert replies[2] == b"1"
    assert await client.pipelined([]) == []


async def test_trim_keeps_what_a_group_needs(client: Client, keys: Keys, topic: Topic) -> None:
    """Without a group nothing is removed; with one, what it has settled."""
    stream = keys.stream("orders", 0)
    for _ in range(10):
        await client.execute_command("XADD", stream, "*", "data", "x")
    assert (await trim(client, keys, "orders", 0, keep_age_ms=0, keep_length=0, exact=True)).word == b"NO_GROUPS"
    await ensure_groups(client, keys, topic, "billing")
    read = await client.execute_command("XREADGROUP", "GROUP", "billing", "me", "COUNT", 4, "STREAMS", stream, ">")
    await client.execute_command("XACK", stream, "billing", *[entry for entry, _ in read[0][1]][:3])
    assert await trim(client, keys, "orders", 0, keep_age_ms=0, keep_length=0, exact=True) == (b"OK", 3, "", False)
    assert await client.execute_command("XLEN", stream) == 7


def test_as_dict_reads_a_flat_reply() -> None:
    """Names become text, values stay raw."""
    assert as_dict([b"a", 1, b"b", [b"x"]]) == {"a": 1, "b": [b"x"]}


def test_a_naive_time_is_refused() -> None:
    """A moment without a zone names no moment."""
    with pytest.raises(ConfigError, match="no time zone"):
        start_id((datetime.now(UTC) - timedelta(days=1)).replace(tzinfo=None))
