"""Plain messages of one write and one partition are stored in one transaction: all of them, or none."""

from __future__ import annotations

import pytest

from rsmq.errors import BrokerError, BrokerUnavailable
from rsmq.model.keys import Keys
from rsmq.model.partition import partition_for
from rsmq.model.settings import Settings
from rsmq.producer.batch import EXEC, MULTI
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.client.raw_connection import RawConnection, pack
from rsmq.redis.topics import Topics
from tests.producer.test_producer import publishing, stored
from tests.servers import Server


def key_of(_: int) -> str:
    """All messages go to one partition."""
    return "k"


async def test_a_batch_that_the_server_refuses_is_not_stored(client: Client, keys: Keys, settings: Settings) -> None:
    """Each XADD fails where a foreign key has the name of the stream: the error says so, and the next batch works."""
    async with publishing(client, keys, settings) as producer:
        await producer.publish("orders", 0, key="k")
        stream = keys.stream("orders", partition_for("k", 8))
        assert await client.execute_command("DEL", stream) == 1
        await client.execute_command("SET", stream, "foreign")
        with pytest.raises(BrokerError, match="WRONGTYPE"):
            await producer.publish_many("orders", range(3), key=key_of)
        await client.execute_command("DEL", stream)
        await producer.publish_many("orders", range(3), key=key_of)
    assert [entry[b"data"] for entry in await stored(client, keys, "orders")] == [b"0", b"1", b"2"]


async def test_a_transaction_that_the_server_refuses_at_its_end_is_tried_again(keys: Keys) -> None:
    """EXEC names the reason inside another error: a server that lacks replicas is waited for."""
    with Server() as server, server.client() as plain:
        settings = Settings(url=server.url)
        async with Connector(server.url, settings).connected() as client:
            connection = RawConnection(client)
            await connection.open()
            await connection.exchange([MULTI, pack(("XADD", keys.stream("orders", 0), "*", "data", "1"))])
            plain.config_set("min-replicas-to-write", 1)
            (refused,) = await connection.exchange([EXEC])
            await connection.close()
            assert isinstance(refused, BrokerUnavailable)
            assert "replicas" in str(refused)
            async with publishing(client, keys, settings) as producer:
                plain.config_set("min-replicas-to-write", 0)
                await producer.publish_many("orders", range(3), key=key_of)
            assert len(await stored(client, keys, "orders")) == 3


async def test_a_user_without_multi_publishes_each_message_once(client: Client, keys: Keys, settings: Settings) -> None:
    """The rights of an older version: the messages are stored one by one, and no error denies it."""
    with Server() as server, server.client() as plain:
        plain.execute_command("ACL", "SETUSER", "old", "on", ">secret", "~*", "+@all", "-multi", "-exec")
        as_old = server.url.replace("://", "://old:secret@")
        settings = Settings(url=as_old)
        async with (
            Connector(as_old, settings).connected() as client,
            publishing(client, keys, settings) as producer,
        ):
            ids = await producer.publish_many("orders", range(50), key=key_of)
            found = await stored(client, keys, "orders")
    assert [entry[b"id"].decode() for entry in found] == ids


@pytest.mark.parametrize("on_full", ["reject", "trim"])
async def test_a_limited_topic_takes_any_layout(client: Client, keys: Keys, settings: Settings, on_full: str) -> None:
    """By script or in a transaction, alone and with others, messages of each layout come as they were sent."""
    topics = Topics(client, keys, settings)
    await topics.ensure("orders", 1)
    await topics.change("orders", max_length=100, on_full=on_full)
    async with publishing(client, keys, settings) as producer:
        ids = [
            await producer.publish("orders", 1),
            await producer.publish("orders", b"\r\n", key="é", headers={"a": "ü"}),
        ]
        ids += await producer.publish_many("orders", [2, b"3"], key=lambda _: "k")
    names = [[*entry] for entry in await stored(client, keys, "orders", 1)]
    assert names == [
        [b"data", b"id"],
        [b"data", b"id", b"key", b"type", b"h"],
        [b"data", b"id", b"key"],
        [b"data", b"id", b"key", b"type"],
    ]
    assert [entry[b"id"].decode() for entry in await stored(client, keys, "orders", 1)] == ids
