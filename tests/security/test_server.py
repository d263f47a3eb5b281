"""The findings of the preflight about access, DEBUG and known vulnerabilities."""

from __future__ import annotations

import logging
import os

import pytest

from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Connector
from rsmq.redis.preflight import Finding, ServerFacts, gather, judge, require
from rsmq.redis.preflight.rules import check_access, check_debug, check_patches
from rsmq.redis.preflight.vulnerabilities import VULNERABILITIES, identify, upgrade, vulnerabilities_of
from tests.servers import Kind, Server


async def examine(url: str) -> dict[str, Finding]:
    """The findings about a server, by their topic."""
    settings = Settings(url=url)
    async with Connector(url, settings).connected() as client:
        return {finding.topic: finding for finding in judge(await gather(client, Keys("p")))}


@pytest.mark.parametrize(
    ("info", "flaws"),
    [
        ({"redis_version": "7.0.15"}, 4),
        ({"redis_version": "7.2.10"}, 5),
        ({"redis_version": "7.4.8"}, 4),
        ({"redis_version": "7.4.11"}, 0),
        ({"redis_version": "8.0.4"}, 4),
        ({"redis_version": "8.2.2"}, 5),
        ({"redis_version": "8.2.3"}, 4),
        ({"redis_version": "8.2.8"}, 1),
        ({"redis_version": "8.2.9"}, 0),
        ({"redis_version": "8.4.2"}, 4),
        ({"redis_version": "8.6.3"}, 1),
        ({"redis_version": "8.10.0"}, 0),
        ({"redis_version": "7.2.4", "valkey_version": "8.1.3"}, 3),
        ({"redis_version": "7.2.4", "valkey_version": "8.1.6"}, 2),
        ({"redis_version": "7.2.4", "valkey_version": "8.1.8"}, 0),
        ({"redis_version": "7.2.4", "valkey_version": "9.0.3"}, 2),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, 0),
    ],
)
def test_vulnerabilities_of_a_version_are_counted(info: dict[str, str], flaws: int) -> None:
    """By the number of the server itself: Valkey's redis_version is always 7.2.4, which must not count."""
    found = vulnerabilities_of(info)
    assert found is not None
    assert len(found) == flaws, [each.name for each in found]


@pytest.mark.parametrize(
    "info",
    [{}, {"redis_version": "unknown"}, {"redis_version": "7.4"},
     {"redis_version": "7.2.0", "dragonfly_version": "df-1"}, {"redis_version": "7.2.4", "server_name": "valkey"}],
)  # fmt: skip
def test_unknown_server_has_no_finding(info: dict[str, str]) -> None:
    """An unknown kind of server, or an unknown version, has no finding."""
    assert (identify(info), vulnerabilities_of(info)) == (None, None)
    assert list(check_patches(ServerFacts(info, {}, [], 0, []))) == []


def test_finding_names_the_upgrade() -> None:
    """The smallest step within the branch, another branch where this one gets no fixes; and distributions."""
    (finding,) = check_patches(ServerFacts({"redis_version": "8.2.3"}, {}, [], 0, []))
    assert (finding.level, "8.2.9 or newer" in finding.text) == ("warn", True)
    assert "check your package" in finding.text
    (finding,) = check_patches(ServerFacts({"redis_version": "7.0.15"}, {}, [], 0, []))
    assert "gets no fixes" in finding.text
    assert "CVE-2026-23479" not in finding.text, "it came with 7.2"
    old = {"redis_version": "7.2.4", "valkey_version": "8.1.3"}
    found = vulnerabilities_of(old)
    assert found
    assert upgrade(old, found) == "upgrade to 8.1.7 or newer"
    assert len({flaw.name for flaw in VULNERABILITIES}) == len(VULNERABILITIES)


@pytest.mark.parametrize(("kind", "level"), [("valkey-9.1", "ok"), ("valkey-8.1", "ok"), ("redis-8.2", "warn")])
async def test_vulnerabilities_of_a_real_server_are_a_warning(kind: Kind, level: str) -> None:
    """Known vulnerabilities of the test servers are a warning, never a refusal."""
    with Server(kind=kind, aof=True) as server, server.client() as plain:
        version = plain.info("server")
        finding = (await examine(server.url))["patches"]
        assert finding.level == ("warn" if vulnerabilities_of({k: str(v) for k, v in version.items()}) else "ok")
        if "SERVER_BINARY" not in os.environ:
            assert finding.level == level, finding


@pytest.mark.parametrize("kind", ["valkey-9.1", "redis-8.2"])
async def test_a_server_without_a_password(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    """A socket file is safe; on a port, every program on this machine or in the network has access: a warning."""
    with Server(kind=kind, aof=True) as server:
        assert (await examine(server.url))["access"].level == "ok"
    with Server(kind=kind, aof=True, tcp=True) as server, server.client() as plain:
        finding = (await examine(server.url))["access"]
        assert (finding.level, "every program on this machine" in finding.text) == ("warn", True)
        plain.config_set("protected-mode", "no")
        plain.config_set("bind", "* -::*")
        finding = (await examine(server.url))["access"]
        assert (finding.level, "every machine that reaches port" in finding.text) == ("warn", True)
        settings = Settings(url=server.url)
        async with Connector(server.url, settings).connected() as client:
            with caplog.at_level(logging.WARNING):
                await require(client, settings, Keys("p"))
        assert "docs/security.md" in caplog.text, "said at the start of every worker"


async def test_a_server_with_a_password() -> None:
    """No warning, also for a user without the right to ask."""
    with Server(aof=True, tcp=True, password="pw") as server, server.client() as plain:
        assert (await examine(server.url))["access"].text == "a password is needed"
        plain.execute_command("ACL", "SETUSER", "worker", "on", ">pw", "~p:*", "&p:*", "+@all", "-acl", "-config")
        findings = await examine(server.url.replace("://", "://worker"))
        assert "access" not in findings
        assert "refuse" not in {finding.level for finding in findings.values()}


def test_a_default_user_that_is_off_is_no_way_in() -> None:
    """A user that is off needs no password."""
    facts = ServerFacts({"tcp_port": "6379"}, {"protected-mode": "no"}, [], 0, [], default_flags=("off", "nopass"))
    assert [finding.level for finding in check_access(facts)] == ["ok"]


async def test_enabled_debug_command_is_a_warning() -> None:
    """DEBUG can stop the server: a warning where it is enabled for the network."""
    with Server(aof=True, tcp=True) as server:
        assert (await examine(server.url))["debug"].level == "warn"
    for value in ("no", "local"):
        assert list(check_debug(ServerFacts({"tcp_port": "1"}, {"enable-debug-command": value}, [], 0, []))) == []
