"""One Spark session for all tests of the pipeline, and topics with messages in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the extra is not installed: pip install 'rsmq[spark]'")

import redis
from pyspark.sql import DataFrame, SparkSession

from rsmq.model.keys import Keys
from rsmq.model.partition import partition_for
from rsmq.model.settings import Settings
from rsmq.pipeline import register
from rsmq.pipeline.java import use_java
from tests.pipeline.query import Query
from tests.pipeline.spark_cluster import SHORT_LIVED
from tests.pipeline.vault import Vault
from tests.servers import Server

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",  # a few rows: compiling a plan costs more than running it
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.session.timeZone": "UTC",
    # of its own jars Java need not verify the bytecode: a second of CPU
    "spark.driver.extraJavaOptions": f"{SHORT_LIVED} -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.log.level": "OFF",
    "spark.python.daemon.module": "rsmq.pipeline.daemon",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Real Spark on two cores that tries a task three times. Start-up takes a while: once for all tests."""
    scratch = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LAUNCHER_OPTS", SHORT_LIVED)
        patch.setenv("JAVA_HOME", os.environ.get("JAVA_HOME", ""))  # put back afterwards
        patch.setenv("RSMQ_KEYS", f"k1={b64encode(b'K' * 32).decode()}")  # for its Python workers only
        patch.setenv("RSMQ_BODIES", str(scratch / "bodies"))
        use_java()
        builder = SparkSession.builder.master("local[2,3]").appName("tests")
        for name, value in {**SETTINGS, "spark.local.dir": str(scratch)}.items():
            builder = builder.config(name, value)
        session = builder.config("spark.sql.warehouse.dir", str(scratch / "warehouse")).getOrCreate()
        patch.delenv("RSMQ_KEYS")
        patch.delenv("RSMQ_BODIES")
        register(session)  # as the commands do; Spark finds the source by itself, too, but starts other workers for it
        yield session
        session.stop()


class Store:
    """Topics on a server, filled and looked at with a plain client, by the wire format."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self.client, self.keys = client, keys

    def make(self, topic: str, partitions: int = 2, created_ms: int = 1, **limits: Any) -> None:
        """A topic without messages."""
        self.client.sadd(self.keys.topics, topic)
        self.client.hset(self.keys.topic(topic), mapping={"created_ms": created_ms, **limits, "partitions": partitions})

    def add(self, topic: str, partition: int, fields: Mapping[Any, Any], entry_id: str = "*") -> str:
        """One entry."""
        return str(self.client.xadd(self.keys.stream(topic, partition), dict(fields), entry_id).decode())  # type: ignore[union-attr]

    def fill(self, topic: str, count: int, partitions: int = 2, start: int = 0) -> None:
        """`count` messages, ids `m0`, `m1`, ..., ten keys; message `m7` holds `{"n": 7}`."""
        if not self.client.exists(self.keys.topic(topic)):
            self.make(topic, partitions)
        with self.client.pipeline(transaction=False) as pipe:
            for number in range(start, start + count):
                key = f"k{number % 10}"
                fields = {"data": f'{{"n": {number}}}', "id": f"m{number}", "key": key}
                pipe.xadd(self.keys.stream(topic, partition_for(key, partitions)), fields)
            pipe.execute()

    def entries(self, topic: str, partition: int) -> list[tuple[str, dict[bytes, bytes]]]:
        """The entries of a partition with their ids."""
        found: Any = self.client.xrange(self.keys.stream(topic, partition))
        return [(entry_id.decode(), fields) for entry_id, fields in found]

    def count(self, topic: str, partitions: int = 2) -> int:
        """How many entries a topic has."""
        return sum(int(self.client.xlen(self.keys.stream(topic, part))) for part in range(partitions))  # type: ignore[arg-type]

    def ids(self, topic: str, partitions: int = 2) -> list[str]:
        """The message ids, partition by partition."""
        return [fields[b"id"].decode() for part in range(partitions) for _, fields in self.entries(topic, part)]


@pytest.fixture
def store(server: Server, keys: Keys) -> Iterator[Store]:
    """The shared server under the key prefix of the test."""
    with server.client() as client:
        yield Store(client, keys)


@pytest.fixture
def vault(spark: SparkSession, settings: Settings, tmp_path: Path) -> Vault:
    """An empty archive beside the shared server."""
    return Vault(spark, tmp_path / "archive", settings)


@pytest.fixture
def light(settings: Settings, tmp_path: Path) -> Vault:
    """The same without Spark: no JVM is started."""
    return Vault(None, tmp_path / "archive", settings)


@pytest.fixture
def topic() -> str:
    """The name of a topic that only this test uses."""
    return f"t{uuid.uuid4().hex[:8]}"


@pytest.fixture
def connection(settings: Settings) -> dict[str, str]:
    """The options that lead to the shared server and the key prefix of the test."""
    assert settings.url is not None
    return {"url": settings.url, "prefix": settings.prefix}


@pytest.fixture
def reading(spark: SparkSession, connection: dict[str, str]) -> Callable[..., DataFrame]:
    """`reading(subscribe="orders", ...)`: a batch read from the shared server."""

    def read(**options: Any) -> DataFrame:
        return spark.read.format("rsmq").options(**connection, **options).load()

    return read


@pytest.fixture
def queries(connection: dict[str, str]) -> Iterator[Any]:
    """`queries(subscribe=...)`: a query; all are stopped afterwards."""
    made: list[Query] = []

    def make(**options: object) -> Query:
        made.append(Query(connection, **options))
        return made[-1]

    yield make
    for query in made:
        query.reader.stop()


@pytest.fixture
def writing(connection: dict[str, str]) -> Callable[..., None]:
    """`writing(frame, topic="orders", ...)`: a batch write to the shared server."""

    def write(frame: DataFrame, **options: Any) -> None:
        frame.write.format("rsmq").options(**connection, **options).mode("append").save()

    return write


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
