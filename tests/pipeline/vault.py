"""An archive of a test: its directory, the topics that go into it, and what is in it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from pyspark.sql import SparkSession

from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.pipeline.jobs.archive import ArchiveOptions, ArchiveResult, archive
from rsmq.pipeline.jobs.archive_by_arrow import archive_by_arrow
from rsmq.pipeline.jobs.arrow_archive import ArrowArchive
from rsmq.pipeline.jobs.replay import ReplayJob, ReplayOptions, ReplayPlan, SparkReplay
from rsmq.pipeline.jobs.replay_by_arrow import ArrowReplay
from rsmq.pipeline.jobs.spark_archive import SparkArchive

Fields = tuple[bytes, ...]


@dataclass
class Vault:
    """Short words for what nearly every test does. `server` is a client of its own, for what other clients do."""

    spark: SparkSession | None
    path: Path
    settings: Settings
    connection: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.connection = {"url": self.settings.url or "", "prefix": self.settings.prefix}
        self.server = redis.Redis.from_url(self.settings.url or "", protocol=2)
        self.keys = Keys(self.settings.prefix)
        self.light = ArrowArchive(str(self.path))

    @property
    def store(self) -> SparkArchive:
        """The archive by Spark."""
        assert self.spark is not None, "this vault has no Spark"
        return SparkArchive(self.spark, str(self.path))

    def archive(self, *topics: str, **options: Any) -> ArchiveResult:
        """Archive what is there now."""
        source = self.connection | {"subscribe": ",".join(topics)}
        return archive(self.store.spark, ArchiveOptions(source, str(self.path), **options))

    def archive_by_arrow(self, *topics: str, **options: Any) -> ArchiveResult:
        """The same without Spark."""
        source = self.connection | {"subscribe": ",".join(topics)}
        return archive_by_arrow(ArchiveOptions(source, str(self.path), **options))

    def replay(self, topic: str, to: str, **options: Any) -> ReplayPlan:
        """Replay, and return what was planned."""
        job = self.job(topic, to, **options)
        plan = job.plan()
        job.run(plan)
        return plan

    def job(self, topic: str, to: str, **options: Any) -> ReplayJob:
        """A replay that has not started."""
        return SparkReplay(self.store.spark, ReplayOptions(str(self.path), (topic,), to, **options), self.connection)

    def arrow_job(self, topic: str, to: str, **options: Any) -> ReplayJob:
        """The same without Spark."""
        return ArrowReplay(ReplayOptions(str(self.path), (topic,), to, **options), self.connection)

    def make(self, topic: str, partitions: int = 2) -> None:
        """A topic, with fewer partitions than usual: each costs a task."""
        self.server.hset(self.keys.topic(topic), mapping={"partitions": partitions, "created_ms": 1})
        self.server.sadd(self.keys.topics, topic)

    def add(self, topic: str, numbers: Iterable[int], partitions: int = 2, **fields: str) -> None:
        """Messages `{"n": number}`, keys in turn."""
        self.make(topic, partitions)
        with self.server.pipeline(transaction=False) as pipe:
            for number in numbers:
                stream = self.keys.stream(topic, number % partitions)
                pipe.xadd(stream, {"data": f'{{"n":{number}}}', "key": f"k{number % 4}", "id": f"m{number}", **fields})
            pipe.execute()

    def entries(self, topic: str, partitions: int = 2) -> list[list[Fields]]:
        """The entries of each partition, as fields in order, ids left out."""
        return [
            [tuple(entry[1]) for entry in self.raw("XRANGE", self.keys.stream(topic, number), "-", "+")]
            for number in range(partitions)
        ]

    def raw(self, *command: Any) -> Any:
        """A reply as the server sent it."""
        connection = self.server.connection_pool.get_connection()
        try:
            connection.send_command(*command)
            return connection.read_response()
        finally:
            self.server.connection_pool.release(connection)

    def archived(self, *topics: str) -> list[int]:
        """The numbers in the archive, sorted, each as often as it is there."""
        rows = self.light.read(self.light.parts(topics), ["value"])
        return sorted(json.loads(value)["n"] for value in rows.column("value").to_pylist())

    def position(self, topic: str, partition: int, name: str = "archive") -> bytes | None:
        """How far an archive is, as it has published it on the server."""
        return self.server.hget(self.keys.archived(topic, partition), name)  # type: ignore[return-value]

    def last_id(self, topic: str, partition: int) -> bytes:
        """The newest stream id of a partition."""
        return self.raw("XREVRANGE", self.keys.stream(topic, partition), "+", "-", "COUNT", 1)[0][0]
