"""The archive has each message once, also after failures, and retention knows how far it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from rsmq.errors import ConfigError, RsmqError
from rsmq.model.settings import Settings
from rsmq.pipeline.format.offsets import DataLoss
from rsmq.pipeline.jobs.archive import ArchiveOptions, archive
from rsmq.pipeline.jobs.archive_store import ArchiveStore, Compaction
from rsmq.pipeline.jobs.compact import compact
from rsmq.pipeline.jobs.lookup import find_archived
from tests.pipeline.vault import Vault
from tests.servers import Server


class Crash(RsmqError):
    """What a test raises where a process might die."""


def crash(*_: Any, **__: Any) -> Any:
    """Die here."""
    raise Crash("crashed")


def test_archive_takes_each_message_once_and_then_new_ones_only(vault: Vault) -> None:
    """Two topics go in, in batches; the next run takes what came meanwhile; then there is nothing to do.

    What was cancelled meanwhile is noted beside it. What is trimmed before it was archived is counted in the message,
    and the archive does not go past it in silence.
    """
    vault.add("orders", range(50))
    vault.add("bills", range(100, 120))
    done = vault.archive("orders", "bills", batch=40)
    assert (done.messages, done.batches) == (70, 2)
    vault.add("orders", range(50, 55))
    assert vault.archive("orders", "bills").messages == 5
    last = vault.last_id("orders", 1).decode()
    vault.server.xgroup_create(vault.keys.stream("orders", 1), "g", "0")
    vault.server.zadd(vault.keys.cancelled("orders", 1, "g"), {last: int(last.partition("-")[0])})
    assert vault.archive("orders", "bills").batches == 0
    cancelled = vault.store.read(vault.store.parts(["orders", "bills"])).where("cancelled IS NOT NULL").collect()
    assert [(row.topic, row.partition, row.offset, row.cancelled) for row in cancelled] == [("orders", 1, last, "*")]
    assert vault.archived("orders") == list(range(55))
    assert vault.archived("bills") == list(range(100, 120))
    assert [vault.position("orders", number) for number in (0, 1)] == [vault.last_id("orders", n) for n in (0, 1)]
    first = vault.server.xrange(vault.keys.stream("orders", 0), count=1)[0]
    found = find_archived(str(vault.path), f"0/{first[0].decode()}", topic="orders")
    assert found
    assert (found.data, found.part.split("/")[0]) == (first[1][b"data"], "topic=orders")
    vault.add("orders", range(60, 80))
    vault.server.xtrim(vault.keys.stream("orders", 0), maxlen=4, approximate=False)
    with pytest.raises(DataLoss, match="expected 10, found 4: trimmed before read"):
        vault.archive("orders", "bills")
    assert vault.archived("orders") == list(range(55))


def test_archive_interrupted_around_its_commit_writes_each_message_once(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data of a batch is written, then the process dies, before its record and once more behind it.

    The batch replaces itself, readers see no half of it, and retention hears of it when Spark, too, is done with it.
    """
    vault.add("orders", range(30))
    commit = ArchiveStore.commit

    def die_behind(*args: Any, **kwargs: Any) -> None:
        commit(*args, **kwargs)
        crash()

    for die, counted in ((crash, 0), (die_behind, 1)):
        with monkeypatch.context() as patch:
            patch.setattr(ArchiveStore, "commit", die)
            with pytest.raises(RsmqError):
                vault.archive("orders")
        assert len(vault.store.parts(["orders"])) == counted
        assert vault.position("orders", 0) is None, "retention may trim only what Spark will not read again"
    vault.archive("orders")
    assert vault.archived("orders") == list(range(30))
    assert vault.position("orders", 0) == vault.last_id("orders", 0)


def test_archive_without_sparks_state_continues_where_it_ended(vault: Vault, caplog: pytest.LogCaptureFixture) -> None:
    """The last commit, all of it, or the plan of the last batch behind a compaction: nothing hidden, nothing twice."""
    checkpoint = vault.path / "_rsmq" / "checkpoints" / "archive"
    vault.add("orders", range(20))
    vault.archive("orders")
    lose(checkpoint / "commits" / "0")
    for number in (0, 1):  # Spark wants to read its last batch again, which is in the archive only
        vault.server.xtrim(vault.keys.stream("orders", number), maxlen=0, approximate=False)
    vault.add("orders", range(20, 25))
    vault.archive("orders")
    assert vault.archived("orders") == list(range(25))

    shutil.rmtree(checkpoint)
    vault.add("orders", range(25, 35))
    done = vault.archive("orders", batch=5)
    assert (done.messages, done.batches) == (10, 2), "a new query continues where the archive ends"
    assert len(vault.store.batches()) == 2

    compact(vault.store, until=datetime.now(UTC).date())
    lose(checkpoint / "offsets" / "1")
    lose(checkpoint / "commits" / "1")
    vault.add("orders", range(35, 40))
    assert vault.archive("orders").messages == 5
    assert vault.archived("orders") == list(range(40))
    assert "ends at batch 0, the archive at batch 1" in caplog.text
    assert vault.position("orders", 0) == vault.last_id("orders", 0)


def lose(path: Path) -> None:
    """Remove a file of Spark's, and its checksum."""
    path.unlink()
    path.with_name(f".{path.name}.crc").unlink()


def test_archive_with_a_wrong_password_ends_with_one_line(vault: Vault, spark: SparkSession, tmp_path: Path) -> None:
    """One line that says what to check, and no password in it."""
    secret = tmp_path / "secret"
    secret.write_text("wr0ng\n")
    with Server(password="right") as server:
        source = {"subscribe": "orders", "url": server.url.replace(":right@", ""), "passwordFile": str(secret)}
        with pytest.raises(ConfigError, match="refused the credentials") as caught:
            archive(spark, ArchiveOptions(source, str(vault.path)))
    assert "\n" not in str(caught.value)
    assert "wr0ng" not in str(caught.value)


def test_archive_waits_while_the_server_is_away(spark: SparkSession, tmp_path: Path) -> None:
    """The archive waits and continues by itself: for ten seconds with CHAOS=long, for three otherwise."""
    with Server(aof=True) as server:
        vault = Vault(spark, tmp_path / "archive", Settings(url=server.url, prefix="a"))
        vault.add("orders", range(20))
        server.stop()
        back = threading.Timer(10 if os.environ.get("CHAOS") == "long" else 3, server.start)
        back.start()
        try:
            assert vault.archive("orders").messages == 20
        finally:
            back.join()
        assert vault.archived("orders") == list(range(20))


def test_archive_on_a_full_disk_continues_with_more_room(
    spark: SparkSession, settings: Settings, small_disk: Path
) -> None:
    """It is said in one line; with more room the next run completes it, nothing twice."""
    vault = Vault(spark, small_disk / "archive", settings)
    vault.add("orders", range(400), padding=os.urandom(600).hex())
    vault.add("orders", range(400, 800), padding=os.urandom(600).hex())
    for number in range(800, 1200):
        vault.add("orders", [number], padding=os.urandom(600).hex())
    with pytest.raises(RsmqError, match="the disk is full"):
        vault.archive("orders")
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    vault.archive("orders")
    assert vault.archived("orders") == list(range(1200))


def test_compact_rewrites_a_day_as_one_sorted_file(vault: Vault) -> None:
    """Many files become one, sorted, and what two archives have both written is there once; replayed before, too."""
    vault.add("orders", range(30))
    vault.archive("orders", batch=10)
    vault.archive("orders", name="second")
    assert len(vault.archived("orders")) == 60
    assert vault.replay("orders", "copy").messages == 30
    assert sorted(fields[3] for part in vault.entries("copy", 8) for fields in part) == sorted(
        b"m%d" % number for number in range(30)
    )
    today = datetime.now(UTC).date()
    assert compact(vault.store, until=today - timedelta(days=1)).days == []
    (day,) = compact(vault.store, until=today).days
    assert (day.messages, day.duplicates, day.files_after) == (30, 30, 1)
    assert day.files_before > 2
    assert vault.archived("orders") == list(range(30))
    vault.add("orders", range(30, 35))
    vault.archive("orders")
    assert vault.archived("orders") == list(range(35))
    (day,) = compact(vault.store, until=today).days
    assert (day.messages, day.files_after) == (35, 1)
    assert compact(vault.store, until=today).skipped == 1
    (part,) = vault.store.parts(["orders"])
    rows = [
        (row.partition, row.id_ms, row.id_seq)
        for row in vault.spark.read.parquet(f"{vault.path}/{part.path}").collect()
    ]
    assert rows == sorted(rows)
    assert vault.store.read([part]).count() == vault.spark.read.parquet(str(vault.path)).count() == 35


@pytest.fixture(scope="module")
def finished(spark: SparkSession, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of 20 messages in two batches, for those that copy it."""
    vault = Vault(
        spark, tmp_path_factory.mktemp("finished"), Settings(url=server.url, prefix=f"t{uuid.uuid4().hex[:12]}")
    )
    vault.add("orders", range(20))
    vault.archive("orders", batch=10)
    return vault.path


@pytest.fixture
def copied(vault: Vault, finished: Path) -> Vault:
    """A copy of that."""
    shutil.copytree(finished, vault.path)
    return vault


def test_compact_interrupted_around_its_record_shows_each_message_once(
    copied: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its record the day is as it was, behind it as it will be; readers see each message once all the time."""
    today = datetime.now(UTC).date()
    for step in ("replace", "_complete"):
        with monkeypatch.context() as patch:
            patch.setattr(ArchiveStore, step, crash)
            with pytest.raises(Crash):
                compact(copied.store, until=today)
        assert copied.archived("orders") == list(range(20))
    assert compact(copied.store, until=today).days == [], "the second one had counted already"
    assert copied.archived("orders") == list(range(20))
    assert len(copied.store.parts(["orders"])) == 1


def test_compact_that_comes_second_changes_nothing(copied: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that comes second changes nothing, and says so."""
    today, replace = datetime.now(UTC).date(), ArchiveStore.replace

    def be_second(store: ArchiveStore, mine: Compaction) -> bool:
        monkeypatch.setattr(ArchiveStore, "replace", replace)
        compact(copied.store, until=today)
        return store.replace(mine)

    monkeypatch.setattr(ArchiveStore, "replace", be_second)
    with pytest.raises(RsmqError, match="another compaction has rewritten orders"):
        compact(copied.store, until=today)
    assert copied.archived("orders") == list(range(20))
