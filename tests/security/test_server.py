"""What the start-up check says about a server that strangers can reach, or that has known flaws."""

from __future__ import annotations

import logging
import os

import pytest

from rsmq.connect import Connector
from rsmq.flaw import FLAWS, flaws_of, identify, upgrade
from rsmq.keys import Keys
from rsmq.preflight import Facts, Finding, gather, judge, require
from rsmq.preflight.rule import check_access, check_debug, check_patches
from rsmq.settings import Settings
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
def test_known_flaws(info: dict[str, str], flaws: int) -> None:
    """By the number of the server itself: Valkey's redis_version is always 7.2.4, which must not count."""
    found = flaws_of(info)
    assert found is not None
    assert len(found) == flaws, [str(flaw) for flaw in found]


@pytest.mark.parametrize(
    "info",
    [{}, {"redis_version": "unknown"}, {"redis_version": "7.4"},
     {"redis_version": "7.2.0", "dragonfly_version": "df-1"}, {"redis_version": "7.2.4", "server_name": "valkey"}],
)  # fmt: skip
def test_what_is_not_known_is_not_judged(info: dict[str, str]) -> None:
    """A server of another make, or one that does not tell its version."""
    assert (identify(info), flaws_of(info)) == (None, None)
    assert list(check_patches(Facts(info, {}, [], 0, []))) == []


def test_what_to_do_is_said() -> None:
    """The smallest step within the branch, another branch where this one gets no fixes; and distributions."""
    (finding,) = check_patches(Facts({"redis_version": "8.2.3"}, {}, [], 0, []))
    assert (finding.level, "8.2.9 or newer" in finding.text) == ("warn", True)
    assert "check your package" in finding.text
    (finding,) = check_patches(Facts({"redis_version": "7.0.15"}, {}, [], 0, []))
    assert "gets no fixes" in finding.text
    assert "CVE-2026-23479" not in finding.text, "it came with 7.2"
    old = {"redis_version": "7.2.4", "valkey_version": "8.1.3"}
    found = flaws_of(old)
    assert found
    assert upgrade(old, found) == "upgrade to 8.1.7 or newer"
    assert len({flaw.name for flaw in FLAWS}) == len(FLAWS)


@pytest.mark.parametrize(("kind", "level"), [("valkey-9.1", "ok"), ("valkey-8.1", "ok"), ("redis-8.2", "warn")])
async def test_flaws_of_a_real_server(kind: Kind, level: str) -> None:
    """The servers at hand, as they are: what is found is a warning, never a refusal."""
    with Server(kind=kind, aof=True) as server, server.client() as plain:
        version = plain.info("server")
        finding = (await examine(server.url))["patches"]
        assert finding.level == ("warn" if flaws_of({k: str(v) for k, v in version.items()}) else "ok")
        if "SERVER_BINARY" not in os.environ:
            assert finding.level == level, finding


@pytest.mark.parametrize("kind", ["valkey-9.1", "redis-8.2"])
async def test_a_server_without_a_password(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    """On its socket file only it is its owner's; on a port it is everybody's on this machine, or everybody's."""
    with Server(kind=kind, aof=True) as server:
        assert (await examine(server.url))["access"].level == "ok"
    with Server(kind=kind, aof=True, tcp=True) as server, server.client() as plain:
        finding = (await examine(server.url))["access"]
        assert (finding.level, "every program on this machine" in finding.text) == ("warn", True)
        plain.config_set("protected-mode", "no")
        plain.config_set("bind", "* -::*")
        finding = (await examine(server.url))["access"]
        assert (finding.level, "whoever reaches port" in finding.text) == ("warn", True)
        settings = Settings(url=server.url)
        async with Connector(server.url, settings).connected() as client:
            with caplog.at_level(logging.WARNING):
                await require(client, settings, Keys("p"))
        assert "docs/security.md" in caplog.text, "said at the start of every worker"


async def test_a_server_with_a_password() -> None:
    """Fine, also when the user who asks may not know."""
    with Server(aof=True, tcp=True, password="pw") as server, server.client() as plain:
        assert (await examine(server.url))["access"].text == "a password is needed"
        plain.execute_command("ACL", "SETUSER", "worker", "on", ">pw", "~p:*", "&p:*", "+@all", "-acl", "-config")
        findings = await examine(server.url.replace("://", "://worker"))
        assert "access" not in findings
        assert "refuse" not in {finding.level for finding in findings.values()}


def test_a_default_user_that_is_off_is_no_way_in() -> None:
    """Its missing password then matters to nobody."""
    facts = Facts({"tcp_port": "6379"}, {"protected-mode": "no"}, [], 0, [], default_flags=("off", "nopass"))
    assert [finding.level for finding in check_access(facts)] == ["ok"]


async def test_debug_commands() -> None:
    """Whoever may DEBUG may stop the server: a warning where it is enabled for the network."""
    with Server(aof=True, tcp=True) as server:
        assert (await examine(server.url))["debug"].level == "warn"
    for value in ("no", "local"):
        assert list(check_debug(Facts({"tcp_port": "1"}, {"enable-debug-command": value}, [], 0, []))) == []
