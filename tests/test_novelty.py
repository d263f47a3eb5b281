"""Which newer commands a server has."""

from __future__ import annotations

import pytest

from rsmq.connect import Connector
from rsmq.novelty import newer_commands
from rsmq.settings import Settings
from tests.servers import Kind, Server


@pytest.mark.parametrize(("kind", "known"), [("redis-8.2", ("XACKDEL", "XDELEX")), ("valkey-9.1", ())])
async def test_newer_commands_are_found(kind: Kind, known: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis 8.2 has two of them, Valkey none; whatever it says about its version."""
    monkeypatch.delenv("SERVER_BINARY", raising=False)
    with Server(kind=kind) as server:
        async with Connector(server.url, Settings(url=server.url)).connected() as client:
            assert await newer_commands(client) == known


async def test_who_may_not_ask_gets_none() -> None:
    """A user without COMMAND is told nothing, and nothing breaks."""
    with Server(tcp=True) as server:
        with server.client() as plain:
            plain.execute_command("ACL", "SETUSER", "u", "on", ">pw", "~*", "&*", "+@all", "-command")
        url = server.url.replace("://", "://u:pw@")
        async with Connector(url, Settings(url=url)).connected() as client:
            assert await newer_commands(client) == ()
