"""The rights of each role, as the page states them: enough for what it does, and for nothing else."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from rsmq import Broker, Cancelled, Settings, Settled, TopicFull
from rsmq.dashboard.history import HistorySampler
from rsmq.dashboard.queries import MessageSearch, Queries
from rsmq.dashboard.waiting import WaitingMessages
from rsmq.dlq import DeadLetters, Selection
from rsmq.errors import BrokerError, ConfigError
from rsmq.inspector import Inspector
from rsmq.inspector.key_status import result_keys
from rsmq.inspector.letter_keys import letter_keys
from rsmq.model.keys import Keys
from rsmq.persistence import Devices
from rsmq.redis.client.connector import Connector
from rsmq.redis.topics import lookup_topic
from tests.cli.conftest import Cli
from tests.security.page import PAGE
from tests.servers import Kind, Server

ROOT = Path(__file__).parents[2]
ADMIN = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
PREFIX = "rsmq"


def rule(role: str, page: str) -> list[str]:
    """The rule of a user, as the page has it."""
    (found,) = re.findall(rf"^ACL SETUSER {role} (.*?)(?=^```)", page, re.MULTILINE | re.DOTALL)
    # the inside of a selector is one argument
    return re.findall(r"\([^)]*\)|\S+", found)


RULES = {
    "producer": rule("rsmq-producer", PAGE),
    "commander": rule("rsmq-commander", PAGE),
    "worker": rule("rsmq-worker", PAGE),
    "admin": rule("rsmq", ADMIN),
    "dashboard": rule("rsmq-dashboard", PAGE),
}


@pytest.fixture(scope="module", params=["valkey-9.1", "redis-8.2"])
def guarded(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with a user for each role."""
    kind: Kind = request.param
    with Server(kind=kind, aof=True) as server, server.client() as plain:
        for role, rules in RULES.items():
            plain.execute_command("ACL", "SETUSER", role, "reset", *rules)
        yield server


@pytest.fixture
def topic(guarded: Server, prefix: str) -> str:
    """A topic of the test's own: the prefix is the one of the page."""
    return f"t-{prefix}"


def broker_as(role: str, server: Server, **changes: Any) -> Broker:
    """A broker of that user."""
    return Broker(Settings(url=server.url.replace("://", f"://{role}:secret@"), prefix=PREFIX, **changes))


@asynccontextmanager
async def as_(role: str, server: Server) -> AsyncIterator[Any]:
    """A client of that user, without a preflight."""
    url = server.url.replace("://", f"://{role}:secret@")
    async with Connector(url, Settings(url=url)).connected() as client:
        yield client


async def handled(broker: Broker, topic: str, count: int, **options: Any) -> None:
    """So many messages are handled by a worker of that broker."""
    done, seen = anyio.Event(), list[int]()

    @broker.handler(topic, group="g", **options)
    async def handle(order: dict[str, int]) -> None:
        seen.append(order["n"])
        if len(seen) >= count:
            done.set()

    async with broker.running():
        with anyio.fail_after(30):
            await done.wait()


async def test_a_producer_publishes(guarded: Server, topic: str) -> None:
    """In every way, with no finding against it, and its trial leaves no key."""
    async with broker_as("producer", guarded) as broker:
        await broker.publish(topic, {"n": 1}, key="k", headers={"a": "b"})
        await broker.publish_many(topic, [{"n": n} for n in range(100)])
        assert await broker.publish(topic, {"n": 2}, message_id="m") == "m"
        await broker.publish(topic, {"n": 3}, delay=timedelta(seconds=30))
    with guarded.client() as plain:
        assert plain.keys(f"{PREFIX}:{{%preflight*") == []


@pytest.mark.parametrize("role", ["commander", "worker", "admin"])
async def test_a_commander_looks_cancels_and_reschedules(guarded: Server, topic: str, role: str) -> None:
    """What is delayed, undelivered, settled, or waits for a retry."""
    async with broker_as("worker", guarded) as worker, broker_as(role, guarded) as broker:
        settled = await worker.publish(topic, {"n": 0})
        await handled(worker, topic, 1)
        assert await broker.cancel(settled) == Settled({"g": "settled"})
        assert await broker.cancel(await broker.publish(f"{topic}.new", {"n": 1})) == Cancelled({})
        late = await broker.publish(topic, {"n": 1}, delay="1h")
        assert (await broker.look(late)).state == "delayed"
        await broker.reschedule(late, delay="2h")
        assert await broker.cancel(late) == Cancelled({})
        stored = await broker.publish(topic, {"n": 2})
        assert (await broker.look(str(stored), topic=topic)).group("g").state == "unread"
        assert await broker.cancel(stored) == Cancelled({"g": "cancelled"})
        assert (await broker.look(stored)).group("g").state == "cancelled"
        parked = await broker.publish(topic, {"n": 3})
        at, keys, call = (topic, parked.partition_number, "g"), worker.keys, worker.client.execute_command
        await call("XREADGROUP", "GROUP", "g", "me", "STREAMS", keys.stream(*at[:2]), ">")
        await call("ZADD", keys.retry(*at), 5, f"{(await broker.look(parked)).stream_id}|1")
        await call("HSET", keys.lease(*at), "owner", "me", "until_ms", "5")  # it has run out
        due = await broker.reschedule(parked, delay="2h")
        assert (await broker.look(parked)).group("g").due == due


@pytest.mark.parametrize("role", ["producer", "dashboard"])
async def test_roles_that_only_publish_or_only_read_cancel_nothing(guarded: Server, topic: str, role: str) -> None:
    """They lack the commands, and the error says so."""
    async with broker_as("worker", guarded) as worker:
        ref = await worker.publish(topic, {"n": 0})
        async with broker_as(role, guarded, preflight="warn") as broker:
            with pytest.raises((BrokerError, ConfigError), match="ACL"):
                await broker.cancel(ref)


async def test_a_commander_publishes_unique_messages(guarded: Server, topic: str) -> None:
    """It may look at the message that has the name, replace it, and move it."""
    async with broker_as("worker", guarded) as worker:
        await worker.topics.ensure(topic, 1)
        await worker.client.execute_command("XGROUP", "CREATE", worker.keys.stream(topic, 0), "g", "0", "MKSTREAM")
    async with broker_as("commander", guarded) as broker:
        for name, delay in (("delayed", "1h"), ("at once", None)):
            first = await broker.publish(topic, 1, unique=name, delay=delay)
            assert first.is_new
            assert await broker.publish(topic, 2, unique=name) == first
            second = await broker.publish(topic, 3, unique=name, delay=delay, on_conflict="replace")
            assert second.is_new
            assert await broker.publish(topic, 4, unique=name, delay="2h", on_conflict="extend") == second


async def test_a_producer_meets_a_full_topic(guarded: Server, topic: str) -> None:
    """It may not trim: full is full, and said so."""
    async with broker_as("producer", guarded, partitions=1, max_length=5) as broker:
        with pytest.raises(TopicFull):
            await broker.publish_many(topic, [{"n": n} for n in range(9)])


FORBIDDEN = {
    "producer": [
        ("XREADGROUP", "GROUP", "g", "c", "STREAMS", "{key}", ">"), ("XGROUP", "CREATE", "{key}", "x", "0"),
        ("XACK", "{key}", "g", "1-1"), ("XDEL", "{key}", "1-1"), ("XTRIM", "{key}", "MAXLEN", "0"),
        ("DEL", "{key}"), ("UNLINK", "{key}"), ("SET", "elsewhere", "1"), ("FLUSHALL",), ("KEYS", "*"),
        ("CONFIG", "SET", "maxmemory", "1"), ("ACL", "LIST"),
        ("EVAL", "return redis.call('DEL', KEYS[1])", "1", "{key}"),
        ("EVAL", "return redis.call('XADD', KEYS[1], '*', 'data', '1')", "1", "elsewhere"),
    ],
    "commander": [
        ("XREADGROUP", "GROUP", "g", "c", "STREAMS", "{key}", ">"), ("XGROUP", "SETID", "{key}", "g", "$"),
        ("XACK", "{key}", "g", "1-1"), ("XDEL", "{key}:g:dlq", "1-1"), ("DEL", "{key}"), ("SET", "elsewhere", "1"),
        ("PUBLISH", "elsewhere", ""), ("FLUSHALL",), ("KEYS", "*"),
    ],
    "worker": [
        ("XGROUP", "DESTROY", "{key}", "g"), ("XGROUP", "SETID", "{key}", "g", "$"),
        ("XDEL", "{key}:g:dlq", "1-1"),
        ("SET", "elsewhere", "1"), ("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "SET", "maxmemory", "1"), ("ACL", "LIST"),
        ("EVAL", "return redis.call('XGROUP', 'DESTROY', KEYS[1], 'g')", "1", "{key}"),
        ("PUBLISH", "elsewhere", ""), ("DEBUG", "SLEEP", "0"), ("SHUTDOWN",),
    ],
    "admin": [
        ("SET", "elsewhere", "1"), ("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "SET", "maxmemory", "1"), ("ACL", "LIST"),
        ("EVAL", "return redis.call('DEL', KEYS[1])", "1", "elsewhere"), ("DEBUG", "SLEEP", "0"), ("SHUTDOWN",),
    ],
    "dashboard": [
        ("XADD", "{key}", "*", "data", "1"), ("XACK", "{key}", "g", "1-1"), ("DEL", "{key}"), ("SET", "{key}", "1"),
        ("HSET", "{key}", "a", "1"), ("EVAL", "return 1", "0"), ("EVALSHA", "x", "0"), ("GET", "elsewhere"),
        ("FLUSHALL",), ("XREADGROUP", "GROUP", "g", "c", "STREAMS", "{key}", ">"), ("CONFIG", "GET", "requirepass"),
        ("ACL", "LIST"), ("CLIENT", "KILL", "ID", "1"), ("PUBLISH", "rsmq:x", ""),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("role", "command"), [(role, each) for role, all_ in FORBIDDEN.items() for each in all_])
async def test_no_role_does_more(guarded: Server, role: str, command: tuple[str, ...]) -> None:
    """The server refuses other commands, also inside a script, and keys outside the prefix."""
    key = Keys(PREFIX).stream("orders", 0)
    with guarded.client() as plain:
        plain.xadd(key, {"data": "1"})
        async with as_(role, guarded) as client:
            with pytest.raises((ConfigError, BrokerError)) as caught:
                await client.execute_command(*(part.replace("{key}", key) for part in command))
        assert any(mark in str(caught.value) for mark in ("ACL", "NOPERM", "permission", "can't run", "can't access"))
        assert plain.xlen(key) > 0
        plain.delete(key)


async def test_a_worker_works(guarded: Server, topic: str) -> None:
    """Handles, retries, buries, moves what was delayed, joins and leaves; devices get and acknowledge letters."""
    async with broker_as("worker", guarded, delay_resolution=timedelta(milliseconds=10)) as broker:
        await broker.publish_many(topic, [{"n": n} for n in range(50)])
        await broker.publish(topic, {"n": 50}, delay=timedelta(milliseconds=50))
        await broker.client.execute_command("XADD", broker.keys.stream(topic, 0), "*", "no", "data")
        await handled(broker, topic, 51)
        assert await broker.dead_letters.count(await lookup_topic(broker.topics, topic), "g") == 1
        await broker.send(f"phone-{topic}", {"n": 1})
        async with broker.connect(f"phone-{topic}") as session:
            await session.ack(await anext(session))


async def test_a_worker_shares(guarded: Server, topic: str) -> None:
    """Shared distribution needs no other right."""
    async with broker_as("worker", guarded) as broker:
        await broker.publish_many(topic, [{"n": n} for n in range(20)])
        await handled(broker, topic, 20, distribution="shared", ordering="none")


async def test_a_worker_does_not_administer(guarded: Server, topic: str) -> None:
    """Reset and replay are refused with what is missing, before anything has changed."""
    async with broker_as("worker", guarded) as broker:
        await broker.client.execute_command("XADD", broker.keys.stream(topic, 0), "*", "no", "data")
        await broker.publish_many(topic, [{"n": n} for n in range(20)])
        await handled(broker, topic, 20)
        found = await lookup_topic(broker.topics, topic)
        (letter,) = [each async for each in broker.dead_letters.iterate(found, "g")]
        length = await broker.client.execute_command("XLEN", broker.keys.stream(topic, 0))
        for attempt in (broker.dead_letters.replay(found, "g", [letter.id]), broker.reset_group(topic, "g")):
            with pytest.raises((ConfigError, BrokerError), match=r"ACL|NOPERM|can't run"):
                await attempt
        assert await broker.client.execute_command("XLEN", broker.keys.stream(topic, 0)) == length
        assert await broker.dead_letters.count(found, "g") == 1


async def test_an_admin_administers(guarded: Server, topic: str) -> None:
    """Replays, purges, resets and deletes."""
    async with broker_as("admin", guarded) as broker:
        await broker.publish(topic, {"n": 1})
        await broker.client.execute_command("XADD", broker.keys.stream(topic, 0), "*", "no", "data")
        await handled(broker, topic, 1)
        found = await lookup_topic(broker.topics, topic)
        (letter,) = [each async for each in broker.dead_letters.iterate(found, "g")]
        assert await broker.dead_letters.replay(found, "g", [letter.id]) == 1
        assert await broker.dead_letters.purge(found, "g") == 0
        await broker.pause_group(topic, "g")
        await broker.reset_group(topic, "g")
        await broker.send(f"phone-{topic}", {"n": 1})
        assert await broker.devices.purge(f"phone-{topic}") == 1
        await broker.topics.delete(topic)
        assert await broker.topics.find(topic) is None


async def test_an_admin_counts_keys_of_letters_and_results(guarded: Server, topic: str) -> None:
    """`rsmq keys status --devices --results` reads the beginning of each."""
    async with broker_as("admin", guarded) as broker:
        await broker.send(f"phone-{topic}", {"n": 1})
        await broker.client.execute_command("SET", broker.keys.result(topic, 0, "g", "m"), b"{}\n1")
        assert (await letter_keys(broker.client, broker.keys))["letters"].total() >= 1
        assert (await result_keys(broker.client, broker.keys)).total() >= 1


@pytest.fixture
async def served(guarded: Server, topic: str) -> AsyncIterator[Broker]:
    """A worker of the topic, with a message in flight and one that was never delivered."""
    broker = broker_as("worker", guarded, prefetch=1)
    started = anyio.Event()

    @broker.handler(topic, group="g", partitions=1, concurrency=1)
    async def handle(order: dict[str, int]) -> None:
        started.set()
        await anyio.sleep_forever()

    async with broker.running():
        await broker.publish_many(topic, [{"n": n} for n in range(3)])
        with anyio.fail_after(30):
            await started.wait()
        yield broker
        broker.stop(timedelta(0))


async def rsmq(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, as the user of the dashboard."""
    url = server.url.replace("://", "://dashboard:secret@")
    return await anyio.to_thread.run_sync(lambda: Cli(Path.cwd(), {"RSMQ_URL": url})(*arguments))


async def test_dashboard_user_runs_top(guarded: Server, served: Broker, topic: str) -> None:
    """`rsmq top` shows the group, its lag and its member to a user who may run no script."""
    result = await rsmq(guarded, "top", topic, "--once", "--every", "PT0.1S", "--json")
    assert result.returncode == 0, result.stderr
    board = json.loads(result.stdout)
    (group,) = board["groups"]
    assert (group["name"], group["backlog"], group["owned"]) == ("g", 3, 1)
    assert served.worker is not None
    assert [member["id"] for member in group["members"]] == [served.worker.member]


async def test_dashboard_user_runs_doctor(guarded: Server, served: Broker, topic: str) -> None:
    """`rsmq doctor` judges the queues; it exits with 1, because a worker of this user would be refused."""
    with guarded.client() as plain:
        plain.hset(Keys(PREFIX).group(topic, "g"), "paused", "1")
    result = await rsmq(guarded, "doctor", "--over", "PT0S", "--json")
    assert result.returncode == 1, result.stderr
    texts = [finding["text"] for finding in json.loads(result.stdout)["findings"]]
    assert f"group g of {topic} is paused: `rsmq group resume {topic} g`" in texts
    assert any("xreadgroup" in text.lower() or "eval" in text.lower() for text in texts), "the missing rights"


async def test_dashboard_user_sees_all_pages(guarded: Server, served: Broker, topic: str) -> None:
    """The poller behind the live pages, and every query of the others."""
    await served.send(f"phone-{topic}", {"n": 1})
    async with as_("dashboard", guarded) as client:
        queries = Queries(client, Keys(PREFIX), Settings(prefix=PREFIX))
        await queries.poller.poll()
        assert queries.poller.trouble == ""
        (group,) = [each for each in queries.poller.board.groups if each.topic == topic]
        assert (group.name, group.is_unserved, group.owned) == ("g", False, 1)
        assert (await queries.topic(topic)).partitions == 1
        messages = (await queries.messages(topic, MessageSearch(partition=0))).entries
        assert len(messages) == 3
        assert (await queries.group(topic, "g")).name == topic
        assert len(await queries.pending(topic, "g")) <= 3
        assert await queries.batches.matching("", 10) == ([], 0)
        waiting = WaitingMessages(client, Keys(PREFIX), Settings(prefix=PREFIX))
        assert await waiting.delayed(await queries.topic(topic)) == []
        assert await waiting.parked(await queries.topic(topic), "g") == []
        history = HistorySampler(client, Keys(PREFIX), Inspector(client, Keys(PREFIX), Settings(prefix=PREFIX)))
        await history.load()
        await history.take()
        await history.take()
        assert len(history.samples) == 1, "kept in memory: this user may not write it"
        assert await queries.dead_letters(topic, "g", Selection()) == ([], False, {})
        devices, _ = await queries.devices(only_waiting=True)
        assert f"phone-{topic}" in [device.client_id for device in devices]
        await served.client.execute_command("ZADD", served.keys.gateways, 1, "g1")
        await served.client.execute_command("HSET", served.keys.gateway_clients("g1"), f"phone-{topic}", "1:0")
        assert [(each.name, each.clients, each.is_late) for each in await queries.mqtt.gateways()] == [("g1", 1, True)]
        assert await queries.mqtt_clients() == ([], False)  # it has no session of MQTT
        assert len(await queries.letters(f"phone-{topic}")) == 1


async def test_dashboard_user_asks_the_inspector_about_members(guarded: Server, served: Broker, topic: str) -> None:
    """Heartbeat and presence of a live member are visible to this user."""
    async with as_("dashboard", guarded) as client:
        (member,) = await Inspector(client, Keys(PREFIX), Settings(prefix=PREFIX)).members(topic)
    assert member.is_present
    assert member.heard_ago is not None


async def test_a_dashboard_looks(guarded: Server, topic: str) -> None:
    """Every question of the inspector, the dead letters and the devices; nothing is written by it."""
    keys = Keys(PREFIX)
    async with broker_as("worker", guarded) as broker:
        await broker.publish(topic, {"n": 1})
        await broker.client.execute_command("XADD", broker.keys.stream(topic, 0), "*", "no", "data")
        await handled(broker, topic, 1)
        await broker.send(f"phone-{topic}", {"n": 1})
        found = await lookup_topic(broker.topics, topic)
    with guarded.client() as plain:
        before = plain.info("persistence")["rdb_changes_since_last_save"]
        async with as_("dashboard", guarded) as client:
            inspector = Inspector(client, keys, Settings(prefix=PREFIX))
            assert topic in [state.topic.name for state in await inspector.topics()]
            assert [state.dead_letters for state in await inspector.groups(topic)] == [1]
            assert await inspector.members(topic) == []
            letters = [each async for each in DeadLetters(client, keys).iterate(found, "g")]
            assert [letter.reason for letter in letters] == ["malformed"]
            devices = Devices(client, keys)
            assert f"phone-{topic}" in [name async for name in devices.names()]
            assert len(await devices.peek(f"phone-{topic}")) == 1
        assert plain.info("persistence")["rdb_changes_since_last_save"] == before
