"""How Spark reaches the server: secrets, TLS, rights, and a server that is away."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from anyio.from_thread import start_blocking_portal
from pyspark.sql import SparkSession

from rsmq.errors import BrokerUnavailable, ConfigError
from rsmq.model.keys import Keys
from rsmq.pipeline.format.options import write_options
from rsmq.pipeline.format.writer import write_rows
from rsmq.pipeline.source import RsmqSource
from rsmq.pipeline.spark.errors import spark_errors
from tests.pipeline.conftest import Store
from tests.servers import Server

PAGE = (Path(__file__).parents[2] / "docs" / "keys.md").read_text(encoding="utf-8")


def rows(options: dict[str, str]) -> list[dict[str, Any]]:
    """All rows of a batch read."""
    source = RsmqSource(options)
    reader = source.reader(source.schema())
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def read_by_spark(spark: SparkSession, options: dict[str, str]) -> int:
    """How many rows a batch read by real Spark has: options, secrets and all travel to its workers."""
    return spark.read.format("rsmq").options(**options).load().where("value IS NOT NULL").count()


def write_by_spark(spark: SparkSession, options: dict[str, str], count: int) -> None:
    """A batch write by real Spark, of so many messages."""
    known = {name: text for name, text in options.items() if not name.startswith("subscribe")}
    rows = spark.range(count).selectExpr("CAST(id AS STRING) AS value")
    rows.write.format("rsmq").options(**known).mode("append").save()


@pytest.fixture
def guarded(keys: Keys) -> Iterator[tuple[Server, Store]]:
    """A server of its own that wants a password, over TCP, and keeps what it has."""
    with Server(aof=True, tcp=True, password="pass word") as server, server.client() as client:
        yield server, Store(client, keys)


def test_a_password_from_a_variable_or_a_file_is_used(
    guarded: tuple[Server, Store], keys: Keys, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file or a variable; a wrong one, and none, is one line, and is not tried again."""
    server, store = guarded
    store.fill(topic, 20)
    options = {"url": f"redis://127.0.0.1:{server.port}/0", "prefix": keys.prefix, "subscribe": topic}
    secret = tmp_path / "secret"
    secret.write_text("pass word\n")
    assert len(rows({**options, "passwordFile": str(secret)})) == 20
    monkeypatch.setenv("REDIS_PASSWORD", "pass word")
    assert len(rows({**options, "passwordEnv": "REDIS_PASSWORD"})) == 20
    monkeypatch.setenv("REDIS_PASSWORD", "wrong one")
    for wrong in ({"passwordEnv": "REDIS_PASSWORD"}, {}):
        with pytest.raises(ConfigError, match="refused the credentials") as caught:
            rows({**options, **wrong})
        assert "\n" not in str(caught.value)
        assert "wrong one" not in str(caught.value)


def test_a_user_with_read_rights_can_read_and_not_write(
    spark: SparkSession,
    store: Store,
    connection: dict[str, str],
    server: Server,
    prefix: str,
    topic: str,
    tmp_path: Path,
) -> None:
    """The rights on the page are enough for reads of every kind, and for nothing else; by real Spark, too."""
    store.fill(topic, 100)
    (line,) = re.findall(r"^ACL SETUSER rsmq-reader (.*?)(?=^```)", PAGE, re.MULTILINE | re.DOTALL)
    user = f"u-{prefix}"
    store.client.execute_command("ACL", "SETUSER", user, *line.replace("rsmq:", f"{prefix}:").split())
    try:
        options = {**connection, "url": server.url.replace("://", f"://{user}@"), "subscribePattern": topic}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SECRET", "secret")
            options["passwordEnv"] = "SECRET"
            assert len(rows({**options, "minPartitions": "5"})) == 100
            assert len(rows({**options, "endingTimestamp": "2100-01-01T00:00:00Z"})) == 100
            with pytest.raises(ConfigError, match=r"ACL does not allow this.*docs/keys\.md"):
                write({**options, "topic": topic}, ["x"])
        (tmp_path / "secret").write_text("secret\n")
        options = {name: text for name, text in options.items() if name != "passwordEnv"}
        options["passwordFile"] = str(tmp_path / "secret")
        assert read_by_spark(spark, {**options, "minPartitions": "3"}) == 100
        with pytest.raises(ConfigError, match=r"ACL does not allow this.*docs/keys\.md"), spark_errors():
            write_by_spark(spark, {**options, "topic": topic}, 1)
        assert store.count(topic) == 100
    finally:
        store.client.execute_command("ACL", "DELUSER", user)


def write(options: dict[str, str], values: list[str]) -> int:
    """One task that writes values; returns how many were stored."""
    known = {name: text for name, text in options.items() if not name.startswith("subscribe")}
    return write_rows(write_options(known), iter([pa.RecordBatch.from_pydict({"value": values})])).stored


def test_a_server_restart_is_waited_for(guarded: tuple[Server, Store], keys: Keys, topic: str, tmp_path: Path) -> None:
    """In the middle of a range the task waits and continues where it was, and so does a write."""
    server, store = guarded
    store.fill(topic, 500, partitions=1)
    (tmp_path / "secret").write_text("pass word")
    options = {"url": f"redis://127.0.0.1:{server.port}/0", "prefix": keys.prefix}
    options["passwordFile"] = str(tmp_path / "secret")
    source = RsmqSource({**options, "subscribe": topic, "fetchSize": "100"})
    reader = source.reader(source.schema())
    (work,) = reader.partitions()
    batches = reader.read(work)
    found = [next(batches)]
    server.kill()
    starting = threading.Thread(target=server.start)
    starting.start()
    found += batches
    starting.join()
    assert [value for batch in found for value in batch["value"].to_pylist()] == [
        f'{{"n": {number}}}'.encode() for number in range(500)
    ]
    server.kill()
    starting = threading.Thread(target=server.start)
    starting.start()
    assert write({**options, "topic": topic}, ["late"]) == 1
    starting.join()


def test_a_server_that_stays_away_ends_the_task_in_time(
    connection: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patience has an end: `RSMQ_UNAVAILABLE_TIMEOUT`."""
    monkeypatch.setenv("RSMQ_UNAVAILABLE_TIMEOUT", "PT0.2S")
    nowhere = {**connection, "url": f"unix://{tmp_path / 's'}"}
    with pytest.raises(BrokerUnavailable, match="Is it running"):
        rows({**nowhere, "subscribe": "a"})
    with pytest.raises(BrokerUnavailable, match="Is it running"):
        write({**nowhere, "topic": "a"}, ["x"])


@asynccontextmanager
async def tls_line(server: Server, certificate: Path, key: Path) -> AsyncIterator[int]:
    """A port that speaks TLS and forwards to the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(server.directory / "s")
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    line = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with line:
        yield line.sockets[0].getsockname()[1]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """One of our own for this machine, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("a certificate is made with the command openssl, which is not there")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


def test_tls_is_checked_by_reads_and_writes(
    spark: SparkSession,
    server: Server,
    store: Store,
    connection: dict[str, str],
    topic: str,
    certificate: tuple[Path, Path],
) -> None:
    """`rediss://` with a certificate of one's own works by real Spark; an untrusted one is refused."""
    store.fill(topic, 30)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(tls_line(server, *certificate)) as port:
        options = {
            **connection,
            "url": f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate[0]}",
            "subscribe": topic,
        }
        assert read_by_spark(spark, options) == 30
        write_by_spark(spark, {**options, "topic": topic}, 5)
        assert store.count(topic) == 35
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RSMQ_UNAVAILABLE_TIMEOUT", "PT0.1S")
            with pytest.raises(BrokerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                rows({**options, "url": f"rediss://127.0.0.1:{port}/0"})
