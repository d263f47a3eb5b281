"""Publishing: what was confirmed is stored exactly once and in order, also over connection failures."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest

from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError, PublishUnknown, RsmqError, TooLarge, TopicFull
from rsmq.model.clock import epoch_ms
from rsmq.model.keys import Keys
from rsmq.model.message import BYTES
from rsmq.model.packing import unpack_fields
from rsmq.model.partition import partition_for
from rsmq.model.settings import Settings
from rsmq.producer import Producer, sender
from rsmq.producer.in_doubt import InDoubt, search
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.client.raw_connection import RawConnection, pack
from rsmq.redis.streams import as_dict, ensure_groups, groups_of, trim
from rsmq.redis.topics import Topics
from rsmq.testing.proxy import Proxy
from tests.patience import until
from tests.servers import Server


@asynccontextmanager
async def publishing(client: Client, keys: Keys, settings: Settings) -> AsyncIterator[Producer]:
    """A producer that runs inside the block."""
    producer = Producer(client, keys, settings, Topics(client, keys, settings))
    async with anyio.create_task_group() as tasks:
        await tasks.start(producer.run)
        try:
            yield producer
        finally:
            tasks.cancel_scope.cancel()


@pytest.fixture
async def producer(client: Client, keys: Keys, settings: Settings) -> AsyncIterator[Producer]:
    """A running producer on the shared server."""
    async with publishing(client, keys, settings) as running:
        yield running


async def stored(client: Client, keys: Keys, topic: str, partitions: int = 8) -> list[dict[bytes, bytes]]:
    """Everything in a topic, partition by partition in stream order."""
    found = []
    for number in range(partitions):
        for _, fields in await client.execute_command("XRANGE", keys.stream(topic, number), "-", "+"):
            found.append(dict(zip(fields[::2], fields[1::2], strict=True)))
    return found


async def failed(producer: Producer) -> bool:
    """Whether a write has failed and not been made good."""
    return any(sender._backoff.failures > 1 for sender in producer._senders)


async def flying(producer: Producer) -> bool:
    """Whether a write is on its way whose reply has not come."""
    return any(batch.in_doubt for sender in producer._senders for batch in sender._in_flight)


# -- the ordinary way ---------------------------------------------------------------------------------------------


async def test_a_message_is_stored_by_the_wire_format(producer: Producer, client: Client, keys: Keys) -> None:
    """Payload, key, id, type and headers are fields of the entry, in the partition that the key decides."""
    message_id = await producer.publish("orders", {"n": 1}, key="c-42", headers={"a": "b"})
    text_id = await producer.publish("orders", "hello", key="c-42")
    entries = await client.execute_command("XRANGE", keys.stream("orders", partition_for("c-42", 8)), "-", "+")
    assert [fields for _, fields in entries] == [
        [b"data", b'{"n":1}', b"id", message_id.encode(), b"key", b"c-42", b"h", b'{"a":"b"}'],
        [b"data", b"hello", b"id", text_id.encode(), b"key", b"c-42", b"type", b"text/plain"],
    ]


async def test_without_a_key_the_id_decides_the_partition(producer: Producer, client: Client, keys: Keys) -> None:
    """Messages without a key spread over the partitions."""
    message_id = await producer.publish("orders", b"raw")
    (entry,) = await client.execute_command("XRANGE", keys.stream("orders", partition_for(message_id, 8)), "-", "+")
    assert entry[1] == [b"data", b"raw", b"id", message_id.encode(), b"type", b"application/octet-stream"]


async def test_ref_knows_where_its_message_is(producer: Producer, client: Client, keys: Keys) -> None:
    """What publish returns is the id as text, and knows topic, partition and key, also after a journey as a pickle."""
    plain = await producer.publish("orders", 1)
    keyed = await producer.publish("orders", 2, key="ada", delay=timedelta(hours=1))
    for ref in (plain, keyed, pickle.loads(pickle.dumps(keyed)), copy.copy(plain)):
        assert (ref.topic, ref.partition_number) == ("orders", partition_for(ref.key or ref, 8))
        assert json.dumps([ref]) == f'["{ref}"]'
    assert (plain.key, keyed.key, pickle.loads(pickle.dumps(keyed)).key) == (None, "ada", "ada")
    again = await producer.publish("orders", 3, key="ada")
    assert again.home is keyed.home  # a program that keeps its refs keeps nothing else
    where = keys.stream("orders", plain.partition_number)
    # a plain message goes to a random partition: one time in eight to that of ada
    there = [each for each in (plain, again) if each.partition_number == plain.partition_number]
    assert [fields[3].decode() for _, fields in await client.execute_command("XRANGE", where, "-", "+")] == there


async def test_concurrent_calls_share_their_writes(keys: Keys) -> None:
    """64 calls at once cost a few commands, not 64."""
    with Server() as server:
        settings = Settings(url=server.url)
        async with (
            Connector(server.url, settings).connected() as client,
            publishing(client, keys, settings) as producer,
        ):
            await producer.publish("orders", 0)
            await client.execute_command("CONFIG", "RESETSTAT")
            ids = await asyncio.gather(*(producer.publish("orders", number) for number in range(64)))
            calls = (await client.execute_command("INFO", "commandstats")).decode()
            assert len(set(ids)) == 64
            assert len(await stored(client, keys, "orders")) == 65
    transactions = next(line for line in calls.splitlines() if line.startswith("cmdstat_exec:"))
    assert int(transactions.split("calls=")[1].split(",")[0]) <= 8


async def test_order_of_a_key_is_the_order_of_the_calls(producer: Producer, client: Client, keys: Keys) -> None:
    """One after the other, at the same time, and with every way of publishing mixed."""
    for number in range(20):
        await producer.publish("orders", number, key="k")
    async with asyncio.TaskGroup() as tasks:
        for number in range(20, 700):
            message_id = f"m{number}" if number % 7 == 0 else None
            tasks.create_task(producer.publish("orders", number, key="k", message_id=message_id))
    await producer.publish_many("orders", range(700, 2500), key=lambda _: "k")
    entries = await client.execute_command("XRANGE", keys.stream("orders", partition_for("k", 8)), "-", "+")
    assert [int(fields[1]) for _, fields in entries] == list(range(2500))


async def test_message_does_not_overtake_those_that_wait_for_the_topic(
    producer: Producer, client: Client, keys: Keys, settings: Settings
) -> None:
    """Another task reads the topic while 200 calls wait for it, so the next call would find it in the cache."""
    await producer.publish("orders", "the topic exists")
    async with publishing(client, keys, settings) as other, asyncio.TaskGroup() as tasks:
        for number in range(200):
            tasks.create_task(other.publish("orders", number, key="k"))
        await other.read_topic("orders")
        await other.publish("orders", 200, key="k")
    entries = await client.execute_command("XRANGE", keys.stream("orders", partition_for("k", 8)), "-", "+")
    assert [int(fields[1]) for _, fields in entries if b"key" in fields] == list(range(201))


async def test_publish_many_returns_the_ids_in_order(producer: Producer, client: Client, keys: Keys) -> None:
    """Any number of items, keys and headers by function, a payload and an id for each."""
    ids = await producer.publish_many(
        "orders", ({"n": number} for number in range(2345)), key=lambda item: f"k{item['n'] % 50}",
        headers=lambda item: {"n": str(item["n"])} if item["n"] % 2 else None,
    )  # fmt: skip
    found = {entry[b"id"].decode(): entry for entry in await stored(client, keys, "orders")}
    assert len(ids) == len(found) == 2345
    for number, message_id in enumerate(ids):
        entry = found[message_id]
        assert (entry[b"data"], entry[b"key"]) == (b'{"n":%d}' % number, f"k{number % 50}".encode())
        assert (b"h" in entry) == bool(number % 2)
    assert await producer.publish_many("orders", []) == []


async def test_publish_many_takes_large_payloads_in_pieces(producer: Producer, client: Client, keys: Keys) -> None:
    """Twenty megabytes are not one command."""
    ids = await producer.publish_many("orders", [b"x" * 200_000] * 100)
    assert len(ids) == len(await stored(client, keys, "orders")) == 100


# -- refused before anything is sent ------------------------------------------------------------------------------


async def test_a_payload_over_the_limit_is_refused(producer: Producer, client: Client, keys: Keys) -> None:
    """Nothing is sent; the error carries size and limit. Headers and key count too."""
    with pytest.raises(TooLarge) as caught:
        await producer.publish("orders", b"x" * (256 * 1024 + 1))
    assert (caught.value.size, caught.value.limit) == (256 * 1024 + 1, 256 * 1024)
    with pytest.raises(TooLarge):
        await producer.publish("orders", b"", headers={"a": "x" * 256 * 1024})
    await producer.publish("orders", b"x" * 256 * 1024)
    assert len(await stored(client, keys, "orders")) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"key": 42}, r"pass a str"),
        ({"key": "\ud800"}, r"not valid Unicode"),
        ({"key": "\ud800", "message_id": "1"}, r"not valid Unicode"),
        ({"headers": {"a": 1}}, r"must be str"),
        ({"headers": ["a"]}, r"not a mapping"),
        ({"headers": {"a": "\ud800"}}, r"not valid Unicode"),
        ({"message_id": ""}, r"printable"),
        ({"message_id": "a\nb"}, r"printable"),
        ({"message_id": "\ud800"}, r"printable"),
        ({"message_id": "x" * 257}, r"1 to 256"),
        ({"delay": timedelta(seconds=-1)}, r"delay of -1 s"),
        ({"delay": timedelta(days=400)}, r"delay of 400 days"),
        ({"at": datetime(2030, 1, 1)}, r"no time zone"),
        ({"delay": timedelta(1), "at": datetime(2030, 1, 1, tzinfo=UTC)}, r"not both"),
        ({"wait_replicas": -1}, r"0 or more"),
        ({"wait_replicas": "1"}, r"'1' is not possible: use 0 or more"),
    ],
)
async def test_what_no_consumer_could_read_is_refused(
    producer: Producer, client: Client, keys: Keys, options: dict[str, Any], text: str
) -> None:
    """The caller learns what to do instead, and the producer goes on."""
    with pytest.raises(ConfigError, match=text):
        await producer.publish("orders", 1, **options)
    await producer.publish("orders", 2)
    assert [entry[b"data"] for entry in await stored(client, keys, "orders")] == [b"2"]


async def test_publishing_while_closed_is_refused(client: Client, keys: Keys, settings: Settings) -> None:
    """A call on a producer that does not run fails immediately."""
    producer = Producer(client, keys, settings, Topics(client, keys, settings))
    with pytest.raises(ConfigError, match="async with broker"):
        await producer.publish("orders", 1)


# -- idempotent, delayed, replicated ------------------------------------------------------------------------------


async def test_a_given_id_is_stored_once(producer: Producer, client: Client, keys: Keys) -> None:
    """However often and in whichever way it is published within the window, also at the same time."""
    for _ in range(3):
        assert await producer.publish("orders", 1, message_id="pay-7") == "pay-7"
    await asyncio.gather(*(producer.publish("orders", 1, message_id="pay-7") for _ in range(20)))
    for _ in range(2):
        ids = await producer.publish_many("orders", range(1000), message_id=lambda number: f"n{number}")
        assert ids == [f"n{number}" for number in range(1000)]
    assert len(await stored(client, keys, "orders")) == 1001


async def test_a_given_id_tells_whether_it_was_there(producer: Producer) -> None:
    """One of the calls has stored the message; the others say so, and whether they meant the same payload and key."""
    refs = await asyncio.gather(*(producer.publish("orders", 1, message_id="pay-7") for _ in range(20)))
    assert sorted(ref.is_new is True for ref in refs) == [False] * 19 + [True]
    assert all(ref.is_same for ref in refs)
    same, other = [await producer.publish("orders", payload, message_id="pay-7") for payload in (1, 2)]
    assert [(same.is_new, same.is_same), (other.is_new, other.is_same)] == [(False, True), (False, False)]
    await producer.publish("orders", 1, key="k", message_id="keyed")
    assert (await producer.publish("orders", 1, key="k", headers={"a": "b"}, message_id="keyed")).is_same
    plain = pickle.loads(pickle.dumps(other))
    assert (plain, plain.is_new, plain.is_same) == ("pay-7", False, False)
    assert (await producer.publish("orders", 1)).is_new


async def test_a_given_id_of_a_delayed_message_tells_whether_it_was_there(producer: Producer) -> None:
    """Also where the first one has been released meanwhile: then its payload is not known."""
    options: dict[str, Any] = {"key": "k", "message_id": "a"}
    found = [await producer.publish("orders", payload, delay=wait, **options) for payload, wait in
             ((1, "1m"), (1, "9m"), (2, "1m"))]  # fmt: skip
    assert [(ref.is_new, ref.is_same) for ref in found] == [(True, True), (False, True), (False, False)]
    assert (await producer.publish("orders", 1, **options)).is_same is None


async def test_many_given_ids_tell_which_were_there(producer: Producer) -> None:
    """Published again after an error, in another order and with more of them."""
    name = "n{}".format
    first = await producer.publish_many("orders", range(500), key=str, message_id=name)
    again = await producer.publish_many("orders", reversed(range(1000)), key=str, message_id=name)
    assert all(ref.is_new for ref in first)
    assert {ref for ref in again if ref.is_new} == {name(number) for number in range(500, 1000)}
    assert [(ref.topic, ref.key) for ref in again[:2]] == [("orders", "999"), ("orders", "998")]


async def test_a_given_id_does_not_tell_what_a_lost_reply_has_told(keys: Keys) -> None:
    """The write is repeated and finds the message: this call may have stored it, or an earlier one."""
    with Server(tcp=True) as server:
        async with Proxy(server.port) as proxy:
            settings = Settings(url=proxy.url, command_timeout=timedelta(seconds=20))
            async with (
                Connector(proxy.url, settings).connected() as client,
                publishing(client, keys, settings) as producer,
                anyio.create_task_group() as tasks,
            ):
                await producer.publish("orders", 0, key="k", message_id="first")
                refs = list[Any]()

                async def publish() -> None:
                    refs.append(await producer.publish("orders", 1, key="k", message_id="second"))

                proxy.hold(lambda data: data.startswith(b"*2\r\n$2\r\nOK"))
                tasks.start_soon(publish)
                await until(lambda: proxy.is_holding, "the reply is on its way")
                proxy.reset()
                proxy.release()
                await until(lambda: refs, "it is published")
                assert (refs[0].is_new, refs[0].is_same) == (None, True)


async def test_publish_many_takes_a_delay_or_a_time_for_each(producer: Producer, client: Client, keys: Keys) -> None:
    """One `at`, or one by item, and headers by item; those of a key keep their order, and an id is one message."""
    morning, users = datetime(2030, 1, 1, 8, tzinfo=UTC), range(1200)
    zones = {number: f"z{number % 3}" for number in users}
    refs = await producer.publish_many(
        "orders", users, key=lambda number: f"u{number % 100}", headers=lambda number: {"tz": zones[number]},
        at=lambda number: morning + timedelta(hours=number % 3), message_id=lambda number: f"offer-{number}",
        expires=morning + timedelta(days=1),
    )  # fmt: skip
    assert [str(ref) for ref in refs] == [f"offer-{number}" for number in users]
    assert all(ref.is_new for ref in refs)
    again = await producer.publish_many("orders", [0, 5], message_id=lambda number: f"offer-{number}", delay="1h")
    assert [ref.is_new for ref in again] == [False, False]
    await producer.publish_many("late", ["a", "b", "c"], key=lambda _: "k", delay="1h", expires="2h")
    assert await stored(client, keys, "orders") == []
    found = dict[int, list[int]]()
    for partition in range(8):
        rows = await client.execute_command("ZRANGE", keys.delayed("orders", partition), 0, -1, "WITHSCORES")
        for row, score in zip(rows[::2], rows[1::2], strict=True):
            fields = unpack_fields(row)
            found.setdefault(int(float(score)), []).append(int(fields[1]))
            assert json.loads(fields[fields.index(b"h") + 1]) == {"tz": zones[int(fields[1])]}
    assert {due: sorted(numbers) for due, numbers in found.items()} == {
        epoch_ms(morning) + hours * 3_600_000: [number for number in users if number % 3 == hours] for hours in range(3)
    }
    rows = await client.execute_command("ZRANGE", keys.delayed("late", partition_for("k", 8)), 0, -1)
    assert [unpack_fields(row)[1] for row in rows] == [b"a", b"b", b"c"]
    for wrong in ({"at": lambda number: datetime(2030, 1, 1)}, {"delay": "-1s"}, {"at": morning, "delay": "1h"}):
        with pytest.raises(ConfigError):
            await producer.publish_many("orders", [1], **wrong)
    with pytest.raises(ConfigError, match="not after the moment when the message is due"):
        await producer.publish_many("orders", [1], at=morning, expires="1h")


async def test_a_delayed_message_waits(producer: Producer, client: Client, keys: Keys) -> None:
    """It is kept with its due time by the server's clock, and stored once under a given id."""
    seconds, _ = await client.execute_command("TIME")
    await producer.publish("orders", 1, key="k", delay="1m", message_id="a")
    await producer.publish("orders", 1, key="k", delay=timedelta(minutes=9), message_id="a")
    await producer.publish("orders", 2, key="k", at=datetime(2100, 1, 1, tzinfo=UTC))
    await producer.publish("orders", 3, key="k", at=datetime(1999, 1, 1, tzinfo=UTC))
    delayed = keys.delayed("orders", partition_for("k", 8))
    found = await client.execute_command("ZRANGE", delayed, 0, -1, "WITHSCORES")
    due = {unpack_fields(packed)[1]: float(score) for packed, score in zip(found[::2], found[1::2], strict=True)}
    assert 60_000 <= due[b"1"] - int(seconds) * 1000 < 75_000
    assert due[b"2"] == datetime(2100, 1, 1, tzinfo=UTC).timestamp() * 1000
    assert due[b"3"] < int(seconds) * 1000
    assert await stored(client, keys, "orders") == []


async def test_too_few_replicas_is_an_error_that_says_so(client: Client, keys: Keys, settings: Settings) -> None:
    """The message is stored, the caller knows that it has no copy, and other calls do not wait for it."""
    impatient = replace(settings, command_timeout=timedelta(seconds=2))
    async with publishing(client, keys, impatient) as producer:
        with pytest.raises(BrokerError, match="is stored, but only 0 of 1 replicas"):
            await producer.publish("orders", 1, wait_replicas=1)
        await producer.publish("orders", 2)
    assert len(await stored(client, keys, "orders")) == 2


async def test_a_replica_confirms() -> None:
    """With a replica in sync, `wait_replicas=1` returns."""
    keys = Keys()
    now = ("--repl-diskless-sync-delay", "0")
    with Server(*now, tcp=True) as master, Server("--replicaof", "127.0.0.1", str(master.port), tcp=True):
        settings = Settings(url=master.url)
        async with (
            Connector(master.url, settings).connected() as client,
            publishing(client, keys, settings) as producer,
        ):

            async def in_sync() -> bool:
                return b"state=online" in await client.execute_command("INFO", "replication")

            await until(in_sync, "the replica is online")
            ids = await asyncio.gather(*(producer.publish("orders", n, wait_replicas=1) for n in range(10)))
            assert len(ids) == len(await stored(client, keys, "orders")) == 10


# -- a full topic -------------------------------------------------------------------------------------------------


async def test_a_full_topic_refuses_exactly_what_does_not_fit(
    producer: Producer, client: Client, keys: Keys, settings: Settings
) -> None:
    """Of 30 concurrent messages 10 fit; the others end with TopicFull, and nothing of them is stored."""
    topics = Topics(client, keys, settings)
    await topics.ensure("orders", 1)
    await topics.change("orders", max_length=10)
    results = await asyncio.gather(*(producer.publish("orders", n) for n in range(30)), return_exceptions=True)
    full = [result for result in results if isinstance(result, TopicFull)]
    assert (len(full), full[0].max_length, full[0].partition) == (20, 10, 0)
    assert results[10:] == full
    with pytest.raises(TopicFull):
        await producer.publish("orders", 1, message_id="a")
    with pytest.raises(TopicFull):
        await producer.publish_many("orders", range(5))
    assert [entry[b"data"] for entry in await stored(client, keys, "orders", 1)] == [b"%d" % n for n in range(10)]


async def test_settled_entries_make_room(producer: Producer, client: Client, keys: Keys, settings: Settings) -> None:
    """What is only kept for a replay gives way to a new message; what is unsettled does not."""
    topics = Topics(client, keys, settings)
    topic = await topics.ensure("orders", 1)
    await topics.change("orders", max_length=10)
    await producer.publish_many("orders", range(10))
    await ensure_groups(client, keys, topic, "billing")
    stream = keys.stream("orders", 0)
    read = await client.execute_command("XREADGROUP", "GROUP", "billing", "me", "COUNT", 6, "STREAMS", stream, ">")
    await client.execute_command("XACK", stream, "billing", *[entry for entry, _ in read[0][1]])
    results = await asyncio.gather(*(producer.publish("orders", n) for n in range(10, 18)), return_exceptions=True)
    assert [isinstance(result, TopicFull) for result in results] == [False] * 6 + [True] * 2
    assert [entry[b"data"] for entry in await stored(client, keys, "orders", 1)] == [b"%d" % n for n in range(6, 16)]


async def test_a_lost_reply_to_making_room_does_not_refuse_the_message(
    producer: Producer, client: Client, keys: Keys, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries are gone, so there is room: the message is sent again."""
    topics, replies = Topics(client, keys, settings), list[Any]()
    topic = await topics.ensure("orders", 1)
    await topics.change("orders", max_length=10)
    await producer.publish_many("orders", range(10))
    await ensure_groups(client, keys, topic, "billing", "$")

    async def lose_first(*args: Any, **options: Any) -> Any:
        replies.append(await trim(*args, **options))
        if len(replies) == 1:
            raise BrokerUnavailable("the reply is lost")
        return replies[-1]

    monkeypatch.setattr(sender, "trim", lose_first)
    await producer.publish("orders", 10)
    assert [reply.removed for reply in replies] == [10]
    assert [entry[b"data"] for entry in await stored(client, keys, "orders", 1)] == [b"10"]


async def test_a_full_topic_with_trim_drops_the_oldest(
    producer: Producer, client: Client, keys: Keys, settings: Settings
) -> None:
    """`on_full=trim` never refuses a message."""
    topics = Topics(client, keys, settings)
    await topics.ensure("orders", 1)
    await topics.change("orders", max_length=100, on_full="trim")
    await producer.publish_many("orders", range(1000))
    kept = [int(entry[b"data"]) for entry in await stored(client, keys, "orders", 1)]
    assert kept == list(range(1000 - len(kept), 1000))
    assert 100 <= len(kept) < 300


# -- when things break --------------------------------------------------------------------------------------------


async def test_a_forgotten_script_is_sent_again(producer: Producer, client: Client, keys: Keys) -> None:
    """A server that lost its script cache gets the source, and order holds."""
    for number in range(10):
        await client.execute_command("SCRIPT", "FLUSH")
        await producer.publish("orders", number, key="k")
    await client.execute_command("SCRIPT", "FLUSH")
    await producer.publish("orders", 10, key="k", message_id="a")
    await client.execute_command("SCRIPT", "FLUSH")
    await producer.publish("orders", 11, key="k", delay=timedelta(days=1))
    assert [int(entry[b"data"]) for entry in await stored(client, keys, "orders")] == list(range(11))


async def test_a_cancelled_call_does_not_hurt_the_others(producer: Producer, client: Client, keys: Keys) -> None:
    """A cancelled call affects neither the sender nor other calls."""
    await producer.publish("orders", 0)
    tasks = [asyncio.create_task(producer.publish("orders", number, key="k")) for number in range(50)]
    many = asyncio.create_task(producer.publish_many("orders", range(3000)))
    await asyncio.sleep(0)
    for task in [*tasks[::2], many]:
        task.cancel()
    results = await asyncio.gather(*tasks[1::2])
    found = {entry[b"id"].decode() for entry in await stored(client, keys, "orders")}
    assert set(results) <= found
    await producer.publish("orders", 1)


async def test_one_bad_partition_does_not_hurt_the_others(producer: Producer, client: Client, keys: Keys) -> None:
    """A foreign key type is an error only for calls that publish there."""
    await client.execute_command("SET", keys.stream("orders", partition_for("a", 8)), "not a stream")
    other = next(f"k{n}" for n in range(100) if partition_for(f"k{n}", 8) != partition_for("a", 8))
    for _ in range(2):
        bad, good = await asyncio.gather(
            producer.publish("orders", 1, key="a", message_id="x"),
            producer.publish("orders", 2, key=other),
            return_exceptions=True,
        )
        assert isinstance(bad, BrokerError)
        assert not isinstance(bad, BrokerUnavailable)
        assert isinstance(good, str)


@pytest.mark.parametrize("way", ["publish", "many", "once"])
async def test_killed_connections_lose_and_repeat_nothing(keys: Keys, way: str) -> None:
    """Every few milliseconds all connections are killed; each confirmed message is there exactly once, in order."""
    with Server() as server:
        settings = Settings(url=server.url)
        connector = Connector(server.url, settings)
        async with connector.connected() as client, publishing(client, keys, settings) as producer:
            await producer.publish("orders", "first", key="k0")
            confirmed: list[tuple[str, int]] = []

            async def publish(key: str) -> None:
                for number in range(200):
                    options = {"message_id": f"{key}-{number}"} if way == "once" else {}
                    confirmed.append((await producer.publish("orders", number, key=key, **options), number))

            async def publish_many() -> None:
                ids = await producer.publish_many("orders", range(12_000), key=lambda number: f"k{number % 10}")
                confirmed.extend(zip(ids, range(12_000), strict=True))

            async with anyio.create_task_group() as storm:
                storm.start_soon(kill_for_ever, server, keys)
                async with anyio.create_task_group() as tasks:
                    if way == "many":
                        tasks.start_soon(publish_many)
                    else:
                        for number in range(10):
                            tasks.start_soon(publish, f"k{number}")
                storm.cancel_scope.cancel()
            found = await stored_plainly(server, keys)
            assert sorted(entry[b"id"].decode() for entry in found[1:]) == sorted(name for name, _ in confirmed)
            for key in {entry[b"key"] for entry in found}:
                numbers = [int(entry[b"data"]) for entry in found[1:] if entry[b"key"] == key]
                assert numbers == sorted(numbers)


async def kill_for_ever(server: Server, keys: Keys) -> None:
    """Kill all other connections of a server again and again, sometimes right after a write went out.

    Between two of them something more is stored, so that a busy machine can connect and write, too.
    """
    client = Connector(server.url, Settings(url=server.url)).client()
    before = 0

    async def is_more_stored() -> bool:
        return await count_stored(client, keys) > before

    try:
        while True:
            await anyio.sleep(0.004 * random.random())
            before = await count_stored(client, keys)
            await client.execute_command("CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "yes")
            await until(is_more_stored, "something more is stored after a lost connection", 120)
    finally:
        with anyio.CancelScope(shield=True):
            await client.aclose()


async def count_stored(client: Client, keys: Keys) -> int:
    """How many entries topic `orders` has."""
    streams = [keys.stream("orders", partition) for partition in range(Settings().partitions)]
    return sum(await client.pipelined([("XLEN", stream) for stream in streams]))


async def stored_plainly(server: Server, keys: Keys) -> list[dict[bytes, bytes]]:
    """What is in topic `orders`, the entry `first` in front, over a fresh connection."""
    client = Connector(server.url, Settings(url=server.url)).client()
    try:
        found = await stored(client, keys, "orders")
    finally:
        await client.aclose()
    return sorted(found, key=lambda entry: entry[b"data"] != b"first")


async def test_a_write_that_may_still_arrive_is_cut_off(keys: Keys) -> None:
    """A paused server has the command in its socket when the caller's time-out ends: it is stored once all the same."""
    with Server(tcp=True) as server:
        settings = Settings(url=server.url, command_timeout=timedelta(seconds=2), block=timedelta(milliseconds=100))
        async with (
            Connector(server.url, settings).connected() as client,
            publishing(client, keys, settings) as producer,
        ):
            await producer.publish("orders", 0, key="k")
            server.pause()
            async with anyio.create_task_group() as tasks:
                for number in range(1, 6):
                    tasks.start_soon(lambda number: producer.publish("orders", number, key="k"), number)
                await until(lambda: failed(producer), "the time-out has ended and retries are under way")
                server.resume()
            assert [entry[b"data"] for entry in await stored(client, keys, "orders")] == [b"%d" % n for n in range(6)]


async def test_a_search_cuts_the_old_connection_off_first(client: Client, keys: Keys) -> None:
    """What was not read from it by then never will be; the search finds the front of a batch and what lies before."""
    stream = keys.stream("orders", 0)
    since, before, *_ = [await client.execute_command("XADD", stream, "*", "id", name) for name in ("x", "y", "a", "b")]
    old, new = RawConnection(client), RawConnection(client)
    await old.open()
    await new.open()
    doubt = InDoubt(old.client_id, old.address, since, stream)
    assert await search(new, doubt, ["a", "b", "c"]) == (2, before)
    with pytest.raises(BrokerUnavailable):
        await old.exchange([pack(("XADD", stream, "*", "id", "late"))])
    assert await client.execute_command("XLEN", stream) == 4
    assert (await search(new, doubt, ["c"]))[0] == 0
    await client.execute_command("XDEL", stream, before)
    await client.execute_command("XTRIM", stream, "MAXLEN", 1)
    assert (await search(new, doubt, ["a", "b", "c"]))[0] == 2
    await new.close()


@pytest.mark.parametrize("limits", [{"max_length": 100, "on_full": "trim"}, {}])
async def test_a_batch_whose_front_was_trimmed_before_its_lost_reply_was_missed_is_not_repeated(
    keys: Keys, limits: dict[str, Any]
) -> None:
    """The topic trims itself, or another client does: what is found was stored after what is not."""
    with Server(tcp=True) as server:
        async with Proxy(server.port) as proxy:
            settings = Settings(url=proxy.url)
            direct = Connector(server.url, Settings(url=server.url))
            async with (
                Connector(proxy.url, settings).connected() as client,
                direct.connected() as other,
                publishing(client, keys, settings) as producer,
            ):
                topics = Topics(client, keys, settings)
                await topics.ensure("orders", 1)
                await topics.change("orders", **limits)
                await producer.publish("orders", -1)
                stream = keys.stream("orders", 0)

                async def is_complete() -> bool:
                    return bool(
                        int(as_dict(await other.execute_command("XINFO", "STREAM", stream))["entries-added"]) == 201
                    )

                proxy.hold(lambda chunk: chunk.startswith(b"+OK\r\n+QUEUED\r\n"))
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(producer.publish_many, "orders", range(200))
                    await until(lambda: proxy.is_holding, "the server has answered")
                    await until(is_complete, "all are stored")
                    await other.execute_command("XTRIM", stream, "MAXLEN", "100")
                    proxy.reset()
                    proxy.release()
                await producer.publish("orders", 200)
                numbers = [int(entry[b"data"]) for entry in await stored(other, keys, "orders", 1)]
            assert numbers == list(range(numbers[0], 201))
            assert 0 < numbers[0] <= 101


async def test_an_unknown_outcome_is_said_and_can_be_repeated(keys: Keys) -> None:
    """When time runs out after the write, PublishUnknown carries the id; publishing with it again stores it once."""
    with Server(tcp=True) as server:
        settings = Settings(
            url=server.url, command_timeout=timedelta(seconds=1), unavailable_timeout=timedelta(seconds=3)
        )
        async with (
            Connector(server.url, settings).connected() as client,
            publishing(client, keys, settings) as producer,
        ):
            await producer.publish("orders", 0, key="k")
            server.pause()
            with pytest.raises(PublishUnknown) as caught:
                await producer.publish("orders", 1, key="k")
            server.resume()
            again = caught.value.message_id
            for _ in range(3):
                assert await producer.publish("orders", 1, key="k", message_id=again) == again
            found = await stored(client, keys, "orders")
            assert [entry[b"data"] for entry in found] == [b"0", b"1"]


async def test_an_absent_server_is_waited_for_and_then_reported(keys: Keys) -> None:
    """Nothing was sent, so the error is BrokerUnavailable; when the server returns in time, no call fails."""
    with Server(tcp=True, aof=True) as server:
        settings = Settings(url=server.url, unavailable_timeout=timedelta(milliseconds=400))
        patient = replace(settings, unavailable_timeout=timedelta(seconds=30))
        async with (
            Connector(server.url, settings).connected() as client,
            publishing(client, keys, settings) as producer,
        ):
            await producer.publish("orders", 0, key="k")
            server.kill()
            results = await asyncio.gather(
                *(producer.publish("orders", 1, key="k") for _ in range(3)),
                producer.publish("orders", 2, message_id="x"),
                return_exceptions=True,
            )
            assert all(isinstance(result, RsmqError) for result in results)
            with pytest.raises(BrokerUnavailable):
                await producer.publish("orders", 3, key="k")
        async with publishing(client, keys, patient) as producer, anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: producer.publish("orders", 4, key="k"))
            await asyncio.to_thread(server.start)
        assert [entry[b"data"] for entry in await stored(client, keys, "orders")] == [b"0", b"4"]
        await client.aclose()


async def test_out_of_memory_is_backpressure(keys: Keys) -> None:
    """OOM is BrokerUnavailable after the retries, nothing is stored, and publishing works again afterwards."""
    with Server() as server:
        settings = Settings(url=server.url, unavailable_timeout=timedelta(milliseconds=300))
        async with (
            Connector(server.url, settings).connected() as client,
            publishing(client, keys, settings) as producer,
        ):
            await producer.publish("orders", 0, key="k")
            await client.execute_command("CONFIG", "SET", "maxmemory", "1")
            with pytest.raises(BrokerUnavailable, match="out of memory"):
                await producer.publish("orders", 1, key="k")
            await client.execute_command("CONFIG", "SET", "maxmemory", "0")
            await producer.publish("orders", 2, key="k")
            assert [entry[b"data"] for entry in await stored(client, keys, "orders")] == [b"0", b"2"]


async def test_closing_leaves_nobody_waiting(keys: Keys) -> None:
    """Calls that wait while the producer ends get an error that says whether the message may be stored."""
    with Server(tcp=True) as server:
        settings = Settings(url=server.url)
        async with Connector(server.url, settings).connected() as client:
            async with publishing(client, keys, settings) as producer:
                await producer.publish("orders", 0, key="k")
                server.pause()
                sent = asyncio.create_task(producer.publish("orders", 1, key="k"))
                await until(lambda: flying(producer), "it was written")
                queued = asyncio.create_task(producer.publish("orders", 2, key="k"))
                await asyncio.sleep(0)
            server.resume()
            results = await asyncio.gather(sent, queued, return_exceptions=True)
            assert [type(result) for result in results] == [PublishUnknown, BrokerUnavailable]


async def test_groups_see_no_gap(producer: Producer, client: Client, keys: Keys, settings: Settings) -> None:
    """The lag of a group counts exactly what was published."""
    topic = await Topics(client, keys, settings).ensure("orders", 1)
    await ensure_groups(client, keys, topic, "billing")
    await producer.publish_many("orders", range(1234))
    assert (await groups_of(client, keys.stream("orders", 0)))[0]["lag"] == 1234


async def test_a_lost_reply_after_a_failover_to_a_clock_that_is_behind_is_not_repeated(keys: Keys) -> None:
    """The next master has lost the newest entry that the producer knows, and gives lower ids to what comes after."""
    with Server(tcp=True) as server:
        async with Proxy(server.port) as proxy:
            direct = Connector(server.url, Settings(url=server.url))
            settings = Settings(url=proxy.url)
            async with (
                Connector(proxy.url, settings).connected() as client,
                direct.connected() as other,
                publishing(client, keys, settings) as producer,
            ):
                await Topics(client, keys, settings).ensure("orders", 1)
                stream = keys.stream("orders", 0)
                await other.execute_command("XADD", stream, "9999999999999-0", "data", "the clock is ahead")
                await producer.publish("orders", 1)
                await other.execute_command("DEL", stream)
                proxy.reset()
                proxy.hold(lambda chunk: bool(re.fullmatch(rb"\$\d+\r\n\d+-\d+\r\n", chunk)))
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(producer.publish, "orders", 2)
                    await until(lambda: proxy.is_holding, "the server has answered")
                    proxy.reset()
                    proxy.release()
                assert [entry[b"data"] for entry in await stored(other, keys, "orders", 1)] == [b"2"]


@pytest.mark.parametrize("length", [0, 1, 255, 256])
async def test_every_layout_of_a_message_is_stored_as_its_fields(
    producer: Producer, client: Client, keys: Keys, length: int
) -> None:
    """The usual ones are formatted at once, others field by field."""
    key, headers = "k" * length, {"a": "ä", "b": "x" * length}
    for payload in (b"b" * length, {"n": length}):
        for head in (headers, None):
            await producer.publish("shapes", payload, key=key, headers=head)
    found = await stored(client, keys, "shapes")
    assert all(each.pop(b"key") == key.encode() and len(each.pop(b"id")) == 36 for each in found)
    head = json.dumps(headers, ensure_ascii=False, separators=(",", ":")).encode()
    raw, data = {b"data": b"b" * length, b"type": BYTES.encode()}, {b"data": b'{"n":%d}' % length}
    assert found == [raw | {b"h": head}, raw, data | {b"h": head}, data]


@pytest.mark.parametrize("first", [{"key": "a"}, {}, {"key": "a", "delay": timedelta(hours=1)}])
@pytest.mark.parametrize(
    "again", [{"key": "b"}, {}, {"delay": timedelta(hours=1)}, {"key": "c", "delay": timedelta(hours=1)}]
)
async def test_an_id_is_one_message_whatever_its_key(
    producer: Producer, client: Client, keys: Keys, first: dict[str, Any], again: dict[str, Any]
) -> None:
    """In any partition, at once or later: the first one counts, and the second call says so."""
    for number in range(10):
        ref = await producer.publish("orders", "x", message_id=f"id-{number}", **first)
        assert ref.is_new
        other = await producer.publish("orders", "x", message_id=f"id-{number}", **again)
        assert other.is_new is False
        if first.get("key") != again.get("key"):
            assert other.is_same is not True
    refs = await producer.publish_many("orders", range(10), key=lambda n: f"many-{n}", message_id=lambda n: f"id-{n}")
    assert [ref.is_new for ref in refs] == [False] * 10
    total = 0
    for partition in range(8):
        total += await client.execute_command("XLEN", keys.stream("orders", partition))
        total += await client.execute_command("ZCARD", keys.delayed("orders", partition))
    assert total == 10
