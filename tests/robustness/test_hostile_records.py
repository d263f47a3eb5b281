"""What the server holds is never trusted to be what rsmq has written: every kind of record is spoiled in every way.

One bad record costs itself: everything that lists, looks or counts goes on with the others. The scripts are tried in
`tests/redis/lua/test_hostile_records.py`, a worker in `tests/worker/test_spoiled_records.py`, and a gateway in
`tests/gateway/test_spoiled_records.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, get_args

import pytest

from rsmq import Broker, Settings
from rsmq.control.audit import Audit
from rsmq.control.look import Look
from rsmq.control.search import Criteria, FindState, Search
from rsmq.dashboard.history import HistorySampler
from rsmq.gateway.fleet.retained import Retained
from rsmq.heartbeat.registration import longer_leases, read_members
from rsmq.inspector import Inspector
from rsmq.inspector.doctor.facts import gather
from rsmq.inspector.doctor.foreign_keys import foreign_keys
from rsmq.inspector.doctor.rules import judge
from rsmq.inspector.observer import Observer
from rsmq.inspector.retention_holds import retention_holds
from rsmq.inspector.schedules import look_up
from rsmq.model.keys import Keys
from rsmq.persistence.mqtt_clients import MqttClients
from rsmq.redis.outboxes import read_outboxes
from rsmq.redis.preflight import Finding
from rsmq.redis.streams import ensure_groups, trim
from rsmq.redis.topics import Topic
from rsmq.telemetry.exporter import group_samples
from tests.robustness.records import (
    HASHES,
    NO_RECORDS,
    SETS,
    SEVERAL,
    STREAMS,
    STRINGS,
    ZSETS,
    spoilings,
)  # fmt: skip

RECORDS: Final = sorted(HASHES | SETS | ZSETS | STREAMS | STRINGS | SEVERAL)


@pytest.fixture
async def broker(settings: Settings) -> AsyncIterator[Broker]:
    """Two topics with a message each, a group, a pending message, and a letter for a device."""
    made = Broker(replace(settings, preflight="warn", partitions=2))
    async with made:
        for name in ("orders", "others"):
            await made.topics.ensure(name)
            topic = await made.topics.change(name, archive="required")
            await ensure_groups(made.client, made.keys, topic, "billing")
            for number in range(2):
                stream = made.keys.stream(name, number)
                await made.client.execute_command("XADD", stream, "*", "data", "1", "id", f"{name}-{number}")
                await made.client.execute_command(
                    "XREADGROUP", "GROUP", "billing", "me", "COUNT", 1, "STREAMS", stream, ">"
                )
        await made.send("phone", "hello")
        yield made


Reader = Callable[[], Awaitable[object]]


async def everything(broker: Broker) -> list[Reader]:
    """All that reads the records of others: what operators ask, and what roles ask about their neighbours."""
    client, keys, settings = broker.client, broker.keys, broker.settings
    topics = await broker.topics.find_all(["orders", "others"])
    inspector, clients, now = Inspector(client, keys, settings), MqttClients(client, keys), timedelta(0)
    observer = Observer(client, keys, settings)

    readers: list[Reader] = [
        lambda: inspector.snapshot(),
        lambda: inspector.members(),
        lambda: look_up(client, keys, broker.topics),
        lambda: group_samples(observer),
        lambda: judged(broker, now),
        lambda: foreign_keys(client, keys),
        lambda: read_members(client, keys, "orders", "billing"),
        lambda: longer_leases(client, keys, "orders", "billing", 0),
        lambda: read_outboxes(client, keys),
        lambda: Audit(client, keys).newest(),
        lambda: HistorySampler(client, keys, inspector).load(),
        lambda: clients.gateways(),
        lambda: all_of(clients.connected()),
        lambda: clients.find("phone"),
        lambda: clients.some_with_subscriptions(100),
        lambda: all_of(broker.devices.iterate()),
        lambda: broker.devices.find("phone"),
        lambda: broker.devices.peek("phone"),
        lambda: all_of(Retained(client, keys, None, 1000).find("#", 100)),
    ]
    for topic in topics:
        readers += of_topic(broker, topic)
    return readers


def of_topic(broker: Broker, topic: Topic) -> list[Reader]:
    """What is asked of one topic."""
    client, keys, group = broker.client, broker.keys, "billing"
    searches = [Search(client, keys, topic, state, group) for state in get_args(FindState)]
    return [
        lambda: all_of(broker.dead_letters.iterate(topic, group)),
        lambda: retention_holds(client, keys, topic, 0),
        lambda: trim(client, keys, topic.name, 0, keep_age_ms=10**9, keep_length=100),
        lambda: Look(client, keys).at(f"{topic.name}-0", topic, None),
        *(partial(search.run, Criteria(), most=100, scan=1000) for search in searches),
    ]


async def all_of(found: AsyncIterator[Any]) -> list[Any]:
    """All items."""
    return [each async for each in found]


async def judged(broker: Broker, over: timedelta) -> list[Finding]:
    """The findings of the doctor about the queues."""
    return judge(await gather(broker.client, broker.keys, broker.settings, over))


@pytest.mark.parametrize("kind", RECORDS)
async def test_everything_that_reads_goes_on_beside_a_spoiled_record(
    broker: Broker, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing fails, and the other topic is there as ever."""
    keys, ask = broker.keys, broker.client.execute_command
    readers = await everything(broker)
    (entry, *_) = await ask("XRANGE", keys.stream("orders", 0), "-", "+")
    for commands in spoilings(keys, kind, entry[0].decode()):
        for command in commands:
            await ask(*command)
        for reader in readers:
            await reader()
        snapshot = await Inspector(broker.client, keys, broker.settings).snapshot()
        assert "others" in [state.topic.name for state in snapshot.topics]
        caplog.clear()


async def test_the_doctor_names_topics_that_cannot_be_read(broker: Broker) -> None:
    """Their records, and what to do."""
    await broker.client.execute_command("HSET", broker.keys.topic("orders"), "partitions", "word")
    await broker.client.execute_command("SADD", broker.keys.topics, b"\xff")
    found = "\n".join(each.text for each in await judged(broker, timedelta(0)) if each.topic == "records")
    assert "topic 'orders' has 'word'" in found
    assert "'\\xff', which is no name of a topic" in found.replace("\\\\", "\\")


def test_every_kind_of_record_is_spoiled() -> None:
    """A new kind of key comes into `records.py`: spoiled, or with the reason why there is nothing to spoil."""
    known = HASHES | SETS | ZSETS | STREAMS | STRINGS | SEVERAL | frozenset(NO_RECORDS)
    kinds = {name for name, each in vars(Keys).items() if not name.startswith("_") and is_key(each)}
    assert known == kinds


def is_key(member: object) -> bool:
    """Whether a member of `Keys` makes a key."""
    return isinstance(member, property) or inspect.isfunction(member)
