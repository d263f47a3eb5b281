"""Which newer commands a server has."""

from __future__ import annotations

import pytest
import redis

from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Connector
from rsmq.redis.preflight.facts import newer_commands
from tests.servers import Kind, Server


@pytest.mark.parametrize(
    ("kind", "known"), [("redis-8.2", ("XACKDEL", "XDELEX")), ("valkey-9.1", ()), ("valkey-8.1", ())]
)
async def test_newer_commands_are_found(kind: Kind, known: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis 8.2 has two of them, Valkey none, regardless of its version."""
    monkeypatch.delenv("SERVER_BINARY", raising=False)
    with Server(kind=kind) as server:
        async with Connector(server.url, Settings(url=server.url)).connected() as client:
            assert await newer_commands(client) == known


@pytest.mark.parametrize("kind", ["redis-8.2", "valkey-8.1", "valkey-9.1"])
def test_what_no_wheel_carries(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """CLAIM, IDMP and XNACK: as soon as a server here has one, decision 12 is to be measured anew."""
    monkeypatch.delenv("SERVER_BINARY", raising=False)
    with Server(kind=kind) as server, server.client() as client:
        client.xgroup_create("s", "g", "0", mkstream=True)
        for command in (
            ("XREADGROUP", "GROUP", "g", "c", "CLAIM", 0, "STREAMS", "s", ">"),
            ("XADD", "s", "IDMP", "producer", "id", "*", "data", "1"),
            ("XNACK", "s", "g", "SILENT", "IDS", 1, "1-1"),
        ):
            with pytest.raises(redis.ResponseError, match=r"syntax error|unknown command|Invalid stream ID"):
                client.execute_command(*command)


def test_xackdel_keeps_what_another_group_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """ACKED deletes with the last group's settlement, not before; then nothing is there for a replay: decision 12."""
    monkeypatch.delenv("SERVER_BINARY", raising=False)
    with Server(kind="redis-8.2") as server, server.client() as client:
        for group in ("a", "b"):
            client.xgroup_create("s", group, "0", mkstream=True)
        client.xadd("s", {"data": "1"}, id="1-1")
        for group, left in (("a", 1), ("b", 0)):
            client.xreadgroup(group, "c", {"s": ">"})
            client.execute_command("XACKDEL", "s", group, "ACKED", "IDS", 1, "1-1")
            assert client.xlen("s") == left


async def test_who_may_not_ask_gets_none() -> None:
    """A user without the right to COMMAND gets an empty list, and no error."""
    with Server(tcp=True) as server:
        with server.client() as plain:
            plain.execute_command("ACL", "SETUSER", "u", "on", ">pw", "~*", "&*", "+@all", "-command")
        url = server.url.replace("://", "://u:pw@")
        async with Connector(url, Settings(url=url)).connected() as client:
            assert await newer_commands(client) == ()
