"""TLS contexts: shared by the connections of a process, and made anew when a certificate is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rsmq.errors import BrokerUnavailable
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector
from tests.matrix.certificates import Certificates
from tests.matrix.network import FaultyProxy
from tests.servers import Server


@pytest.fixture
def papers(tmp_path: Path) -> Certificates:
    """For this machine."""
    return Certificates.make(tmp_path)


@pytest.fixture
async def secure(papers: Certificates) -> AsyncIterator[Client]:
    """A client by TLS."""
    with Server(tcp=True) as server:
        async with FaultyProxy(server.port, tls=papers.context()) as proxy:
            url = f"rediss://127.0.0.1:{proxy.port}/0?{papers.query}"
            async with Connector(url, Settings(url=url)).connected() as client:
                yield client


@pytest.mark.parametrize(
    ("scheme", "is_tls", "advice"),
    [
        ("redis", True, "If it speaks TLS at this port, use rediss://"),
        ("rediss", False, "does it speak TLS at this port"),
        ("rediss", True, "ssl_ca_certs"),
    ],
    ids=["plain to TLS", "TLS to plain", "unknown authority"],
)
async def test_wrong_scheme_is_said_plainly(papers: Certificates, scheme: str, is_tls: bool, advice: str) -> None:
    """The error says which scheme or option would fit."""
    with Server(tcp=True) as server:
        async with FaultyProxy(server.port, tls=papers.context() if is_tls else None) as proxy:
            url = f"{scheme}://localhost:{proxy.port}/0"
            settings = Settings(url=url, unavailable_timeout="PT0.3S", connect_timeout="PT0.3S", command_timeout="PT1S")
            with pytest.raises(BrokerUnavailable, match=advice):
                async with Connector(url, settings).connected():
                    pass


async def contexts(client: Client) -> set[int]:
    """Those of all connections that a burst of commands has opened."""
    await client.connection_pool.disconnect()
    await asyncio.gather(*(client.execute_command("PING") for _ in range(10)))
    connections = client.connection_pool._available_connections
    assert len(connections) > 1
    return {id(each.ssl_context.get()) for each in connections}


async def test_connections_share_a_context(secure: Client) -> None:
    """However many are opened, one context is made: 25 ms of CPU, during which the loop stands still."""
    assert len(await contexts(secure)) == 1


async def test_a_new_certificate_counts(secure: Client, papers: Certificates, tmp_path: Path) -> None:
    """A file that is replaced is read when a connection is opened again: a process outlives its certificates."""
    (before,) = await contexts(secure)
    papers.client.write_bytes(papers.client.read_bytes())
    (after,) = await contexts(secure)
    assert after != before
