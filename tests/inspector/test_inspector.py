"""Questions to a real server: the answers before, during and after work."""

from __future__ import annotations

from datetime import timedelta

import anyio
import pytest

from rsmq import Broker, Message, Reject, Retry, Settings
from rsmq.inspector.inspector import Inspector, installed
from rsmq.inspector.state import read_info
from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import reset_group, set_paused
from rsmq.redis.topics import Topics
from tests.patience import until


@pytest.fixture
def inspector(client: Client, keys: Keys, settings: Settings) -> Inspector:
    """What is tested."""
    return Inspector(client, keys, settings)


async def test_inspector_without_topics_answers_with_nothing(inspector: Inspector) -> None:
    """Without topics every answer is empty."""
    assert await inspector.topics() == []
    assert await inspector.topic("orders") is None
    assert await inspector.groups() == []
    assert await inspector.groups("orders") == []
    assert await inspector.group("orders", "billing") is None
    assert await inspector.members("orders", "billing") == []


async def test_topic_without_messages_has_empty_partitions(
    inspector: Inspector, client: Client, keys: Keys, settings: Settings
) -> None:
    """A topic that was never published to has partitions without ids."""
    await Topics(client, keys, settings).ensure("orders", 2)
    state = await inspector.topic("orders")
    assert state is not None
    assert (state.length, state.delayed, state.groups) == (0, 0, ())
    assert [(each.partition, each.first_id, each.last_id) for each in state.partitions] == [
        (0, None, None),
        (1, None, None),
    ]


async def test_questions_change_nothing(inspector: Inspector, client: Client, keys: Keys, settings: Settings) -> None:
    """A question creates no key, reads no message and joins no group."""
    async with Broker(settings) as broker:
        await broker.publish("orders", {"n": 1})
    before = sorted(await client.execute_command("KEYS", f"{keys.prefix}:*"))
    await inspector.topics()
    await inspector.groups()
    await inspector.members()
    await inspector.server()
    assert sorted(await client.execute_command("KEYS", f"{keys.prefix}:*")) == before


async def test_group_state_counts_messages_where_they_are(inspector: Inspector, settings: Settings) -> None:
    """Delivered, in flight, parked, dead and delayed messages are counted, with owner and member."""
    broker, held, seen = Broker(settings), anyio.Event(), list[int]()

    @broker.handler("orders", group="billing", partitions=1, ordering="none")
    async def bill(order: dict[str, int], message: Message) -> None:
        seen.append(order["n"])
        if order["n"] == 1:
            raise Retry(after=timedelta(hours=1))
        if order["n"] == 2:
            raise Reject("no")
        if order["n"] == 3:
            await held.wait()

    async with broker.running():
        for number in (1, 2, 3, 4):
            await broker.publish("orders", {"n": number})
        await broker.publish("orders", {"n": 5}, delay=timedelta(hours=1))
        with anyio.fail_after(30):
            while True:
                group = await inspector.group("orders", "billing")
                if group and (group.pending, group.waiting_for_retry, group.dead_letters, group.unread) == (1, 1, 1, 0):
                    break
        topic, (member,) = await inspector.topic("orders"), await inspector.members("orders", "billing")
        held.set()
        await until(lambda: len(seen) == 4, "all were seen")
    (share,) = group.shares
    assert (group.distribution, group.is_paused, group.is_unread_exact) == ("hash", False, True)
    assert group.members == (member.id,) == (share.owner,)
    assert share.epoch >= 1
    assert share.lease_left is not None
    assert timedelta(0) < share.lease_left <= settings.lease_ttl
    assert topic is not None
    assert (topic.length, topic.delayed, topic.groups) == (4, 1, ("billing",))
    assert (member.concurrency, member.is_present, member.partitions) == (64, True, (0,))
    assert member.handler.endswith("bill")
    assert member.heard_ago is not None
    assert member.heard_ago < settings.lease_ttl
    assert await inspector.members() == []


async def test_paused_group_is_reported_as_paused(
    inspector: Inspector, client: Client, keys: Keys, settings: Settings
) -> None:
    """The pause is in its state."""
    topic = await Topics(client, keys, settings).ensure("orders", 1)
    await reset_group(client, keys, topic, "billing", "earliest")
    await set_paused(client, keys, "orders", "billing", paused=True)
    group = await inspector.group("orders", "billing")
    assert group is not None
    assert group.is_paused
    assert group.shares[0].lease_left is None


async def test_lag_after_a_reset_is_an_upper_bound(
    inspector: Inspector, client: Client, keys: Keys, settings: Settings
) -> None:
    """Where the server does not know the lag, it is the length of the stream, and not exact."""
    topic = await Topics(client, keys, settings).ensure("orders", 1)
    ids = [await client.execute_command("XADD", keys.stream("orders", 0), "*", "data", "1") for _ in range(4)]
    await reset_group(client, keys, topic, "billing", ids[1].decode())
    group = await inspector.group("orders", "billing")
    assert group is not None
    assert group.unread >= 2
    assert group.unread == (2 if group.is_unread_exact else 4)


async def test_member_without_heartbeat_is_listed_as_dead(
    inspector: Inspector, client: Client, keys: Keys, settings: Settings
) -> None:
    """A member whose heartbeat has expired is listed without one."""
    topic = await Topics(client, keys, settings).ensure("orders", 1)
    await reset_group(client, keys, topic, "billing", "earliest")
    await client.execute_command("SADD", keys.members("orders", "billing"), "gone-1-ab")
    (member,) = await inspector.members("orders")
    assert (member.id, member.heard_ago, member.is_present) == ("gone-1-ab", None, False)


async def test_server_state_names_server_and_libraries(inspector: Inspector, settings: Settings) -> None:
    """It also has the findings of the preflight."""
    async with Broker(settings) as broker:
        await broker.publish("orders", {"n": 1})
    state = await inspector.server()
    assert state.server.startswith(("Valkey ", "Redis "))
    assert state.url == settings.url
    assert (state.topics, state.groups) == (1, 0)
    assert timedelta(0) < state.round_trip < timedelta(seconds=5)
    assert state.is_hiredis_used
    assert state.redis_py.startswith("8.")
    assert not state.is_refused
    assert {finding.topic for finding in state.findings} >= {"server", "eviction", "persistence"}
    assert state.embedded_directory is None


def test_member_info_that_is_not_an_object_is_empty() -> None:
    """Another client may write anything under the key: it is not an error."""
    assert read_info(b"") == {}
    assert read_info(b"[1]") == {}
    assert read_info(b"\xff") == {}
    assert read_info(b'{"handler": "f"}') == {"handler": "f"}


def test_missing_package_is_not_installed() -> None:
    """A missing library is a value, not an error."""
    assert installed("no-such-package-at-all") == "not installed"
