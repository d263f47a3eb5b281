"""Worker processes that relay one outbox, of which the one that does so is killed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from sqlalchemy import URL, Engine, create_engine

from rsmq.model.keys import Keys
from rsmq.sql import Outbox, create_tables
from rsmq.sql.database import read_identity
from tests import forks
from tests.servers import wait_until

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Lead:
    """Which process relays: the epoch is the moment at which it began, `until_ms` the end of its lease, and `now_ms`
    the moment of the question, all by the server's clock."""

    pid: int
    epoch: int
    until_ms: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class Handover:
    """A relay was killed and another one has relayed. `stored_ms`: when the next row was in its topic."""

    before: Lead
    after: Lead
    stored_ms: int

    @property
    def took_ms(self) -> int:
        """From the death to the next row in its topic."""
        return self.stored_ms - self.before.now_ms


class Relays:
    """Two workers. What they relay is in `rows`."""

    def __init__(self, url: str, prefix: str, database: URL, log: Path) -> None:
        self._keys, self._client = Keys(prefix), redis.Redis.from_url(url, decode_responses=True)
        self._log, self._arguments = log, (url, prefix, database.render_as_string(hide_password=False))
        self._engine: Engine = create_engine(database.set(drivername="postgresql+psycopg"))
        self._outbox = Outbox(self._engine, prefix=prefix)
        self._workers: list[forks.ForkedProcess] = []
        self._work = ""
        self._published = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """The tables exist and two workers run inside of the block."""
        with self._engine.begin() as connection:
            create_tables(connection)
        try:
            self.keep_running()
            wait_until(self._is_known, "the database has an identity")
            yield
        finally:
            for worker in self._workers:
                worker.kill()
                worker.wait()
            self._client.close()
            self._engine.dispose()

    def keep_running(self) -> None:
        """Start those that are missing."""
        self._workers = [each for each in self._workers if each.poll() is None]
        while len(self._workers) < 2:
            with self._log.open("ab") as log:
                name = "tests.sql.outbox_worker"
                self._workers.append(forks.start(name, *self._arguments, cwd=ROOT, env=os.environ, stdout=log))

    def _is_known(self) -> bool:
        with self._engine.connect() as connection:
            self._work = f"outbox.{read_identity(connection)}"
        return not self._work.endswith("None")

    def lead(self) -> Lead | None:
        """Which process relays, or None."""
        pipe: Any = self._client.pipeline(transaction=True)
        (owner, until, epoch), (seconds, micros) = (
            pipe.hmget(self._keys.leader(self._work), "owner", "until_ms", "epoch").time().execute()
        )
        if not owner:
            return None
        return Lead(int(owner.rsplit("-", 2)[1]), int(epoch), int(until), seconds * 1000 + micros // 1000)

    def is_ready(self) -> bool:
        """Whether one relays, and all others have said that they wait."""
        found, said = self.lead(), self._log.read_text()
        others = [each.pid for each in self._workers if found is None or each.pid != found.pid]
        is_led = found is not None and found.until_ms > found.now_ms
        return is_led and len(others) == 1 and all(re.search(f"^{pid} .* waits: ", said, re.M) for pid in others)

    def publish(self, count: int) -> None:
        """So many rows of one transaction, numbered on."""
        with self._engine.begin() as connection:
            numbers = range(self._published, self._published + count)
            self._outbox.publish_many(connection, "orders", numbers, key=lambda _: "ada")
        self._published += count

    def rows(self) -> list[tuple[int, int]]:
        """What is in the topic: when it was stored, and its number."""
        entries: Any = self._client.xrange(self._keys.stream("orders", 0))
        return [(int(stream_id.partition("-")[0]), int(fields["data"])) for stream_id, fields in entries]

    def replace(self, rows: int) -> Handover:
        """Kill the process that relays while it has so many rows to do, and wait for the next row."""
        wait_until(self.is_ready, "one relays and another one waits")
        first = len(self.rows())
        self.publish(rows)
        wait_until(lambda: len(self.rows()) > first, "it relays")
        found = self.lead()
        assert found is not None
        victim = next(each for each in self._workers if each.pid == found.pid)
        victim.kill()
        victim.wait()
        before = self.lead()
        assert before is not None
        assert before.pid == found.pid
        self.publish(1)
        wait_until(lambda: len(self.rows()) >= self._published, "all rows are in the topic")
        after, stored = self.lead(), self.rows()[-1][0]
        assert after is not None
        return Handover(before, after, stored)
