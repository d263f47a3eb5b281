"""TLS: verified by default, never older than 1.2, with client certificates, and the page's words about it are true."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rsmq import Broker, Settings
from rsmq.errors import BrokerUnavailable
from rsmq.redis.client.connector import Connector
from tests.servers import Server


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One for 127.0.0.1, signed by itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("a certificate is made with the command openssl, which is not there")
    certificate, key = (tmp_path_factory.mktemp("tls") / name for name in ("cert.pem", "key.pem"))
    subject = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


@asynccontextmanager
async def line(server: Server, certificate: tuple[Path, Path], **options: Any) -> AsyncIterator[int]:
    """A port that speaks TLS and forwards to the server's socket."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    for name, value in options.items():
        setattr(context, name, value)
    if context.verify_mode != ssl.CERT_NONE:
        context.load_verify_locations(certificate[0])

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(server.directory / "s")
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


async def publish(url: str, prefix: str) -> None:
    """Connect and publish."""
    patience = timedelta(milliseconds=100)
    async with Broker(Settings(url=url, prefix=prefix, preflight="warn", unavailable_timeout=patience)) as broker:
        await broker.publish("t", b"x")


@pytest.mark.parametrize("url", ["rediss://h", "rediss+cluster://h"])
def test_verification_is_on_unless_it_is_turned_off(url: str) -> None:
    """The certificate and the name in it, for the loop and for threads; TLS 1.2 at least."""
    for client in (Connector(url, Settings()).client(), Connector(url, Settings()).blocking_client()):
        connection = client.connection_pool.make_connection()
        context = getattr(connection, "ssl_context", None)
        if context is not None:
            made = context.get()
            assert (made.verify_mode, made.check_hostname) == (ssl.CERT_REQUIRED, True)
            assert made.minimum_version >= ssl.TLSVersion.TLSv1_2
        else:
            assert (connection.cert_reqs, connection.check_hostname) == (ssl.CERT_REQUIRED, True)
    loose = Connector(f"{url}?ssl_cert_reqs=none&ssl_check_hostname=false", Settings()).client()
    assert loose.connection_pool.make_connection().ssl_context.get().verify_mode == ssl.CERT_NONE


async def test_a_certificate_that_nobody_trusts_is_refused(
    server: Server, certificate: tuple[Path, Path], prefix: str
) -> None:
    """Without its authority no byte of a command is sent; with it everything works."""
    async with line(server, certificate) as port:
        with pytest.raises(BrokerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await publish(f"rediss://127.0.0.1:{port}", prefix)
        await publish(f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate[0]}", prefix)


async def test_a_name_that_is_not_in_the_certificate_is_refused(
    server: Server, certificate: tuple[Path, Path], prefix: str
) -> None:
    """It is for 127.0.0.1, not for localhost."""
    async with line(server, certificate) as port:
        with pytest.raises(BrokerUnavailable, match=r"CERTIFICATE_VERIFY_FAILED.*[Hh]ostname mismatch"):
            await publish(f"rediss://localhost:{port}?ssl_ca_certs={certificate[0]}", prefix)


async def test_client_without_certificate_is_refused(
    server: Server, certificate: tuple[Path, Path], prefix: str
) -> None:
    """Where the server demands one, it is named in the address; without it the server refuses the connection."""
    name, key = certificate
    async with line(server, certificate, verify_mode=ssl.CERT_REQUIRED) as port:
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={name}"
        await publish(f"{url}&ssl_certfile={name}&ssl_keyfile={key}", prefix)
        with pytest.raises(BrokerUnavailable):
            await publish(url, prefix)
