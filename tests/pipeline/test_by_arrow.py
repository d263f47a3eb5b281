"""Archive, compact, replay and report in one process: no JVM, the same files and promises as by Spark."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from asyncio import to_thread
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rsmq.broker import Broker
from rsmq.errors import ConfigError, RsmqError
from rsmq.model.settings import Settings
from rsmq.pipeline import find_archived
from rsmq.pipeline.format.offsets import DataLoss
from rsmq.pipeline.jobs import archive_by_arrow as by_arrow
from rsmq.pipeline.jobs.archive_store import ArchiveStore, Part
from rsmq.pipeline.jobs.arrow_archive import ParquetFile
from rsmq.pipeline.jobs.cancellations import CancellationNotes
from rsmq.pipeline.jobs.compact import compact
from rsmq.pipeline.jobs.engine import uses_spark
from rsmq.pipeline.jobs.folder import ArrowFolder, exclusive
from rsmq.pipeline.report.count_by_arrow import count_by_arrow
from rsmq.pipeline.report.count_by_spark import count_by_spark
from rsmq.pipeline.report.data import ReportOptions
from tests.pipeline.test_kill import Command
from tests.pipeline.vault import Vault


class Crash(RsmqError):
    """What a test raises where a process might die."""


def crash(*_: Any, **__: Any) -> Any:
    """Die here."""
    raise Crash("crashed")


def test_archive_takes_each_message_once_and_then_new_ones_only(light: Vault) -> None:
    """Two topics, in batches, one file for each topic and day; then what came meanwhile; then nothing."""
    light.add("orders", range(50))
    light.add("bills", range(100, 120))
    done = light.archive_by_arrow("orders", "bills", batch=40)
    assert (done.messages, done.batches) == (70, 2)
    light.add("orders", range(50, 55), h='{"a": "b"}')
    assert light.archive_by_arrow("orders", "bills").messages == 5
    assert light.archive_by_arrow("orders", "bills").batches == 0
    assert light.archived("orders") == list(range(55))
    assert light.archived("bills") == list(range(100, 120))
    assert [light.position("orders", number) for number in (0, 1)] == [light.last_id("orders", n) for n in (0, 1)]
    assert all(len(light.light.files_of(part)) == 1 for part in light.light.parts(["orders", "bills"]))
    found = find_archived(str(light.path), f"0/{light.last_id('orders', 0).decode()}")
    assert found
    assert (found.key, found.headers) == ("k2", {"a": "b"})


@pytest.mark.parametrize(
    ("place", "step"),
    [(ParquetFile, "close"), (ArrowFolder, "move"), (ArchiveStore, "commit"), (by_arrow, "publish_offsets")],
)
def test_archive_interrupted_at_any_step_has_each_message_once(
    light: Vault, monkeypatch: pytest.MonkeyPatch, place: Any, step: str
) -> None:
    """While a file is written, before it is moved, before its record, before retention knows; then with more."""
    light.add("orders", range(20))
    light.archive_by_arrow("orders")
    light.add("orders", range(20, 40))
    with monkeypatch.context() as patch:
        if step == "publish_offsets":
            known: list[object] = []
            publish = by_arrow.publish_offsets
            patch.setattr(place, step, lambda *args: crash() if known else known.append(publish(*args)))
        else:
            patch.setattr(place, step, crash)
        with pytest.raises(Crash):
            light.archive_by_arrow("orders")
    light.add("orders", range(40, 45))
    light.archive_by_arrow("orders")
    assert light.archived("orders") == list(range(45))
    files = [*light.path.glob("topic=*/**/*.parquet")]
    assert sum(pq.read_metadata(file).num_rows for file in files) == 45, "others who read the folders see no more"
    assert not (light.path / by_arrow.WRITING / "arrow_archive").exists()
    assert light.position("orders", 0) == light.last_id("orders", 0)


def test_archive_and_replay_killed_and_run_again_have_each_message_once(light: Vault, settings: Settings) -> None:
    """SIGKILL to the commands, in the middle of many batches, and in the middle of publishing."""
    light.add("orders", range(6000))
    light.make("copy")
    archive = ("archive", "orders", "--to", str(light.path), "--batch", "20", "--json")
    replay = ("replay", "orders", "--from", str(light.path), "--to", "copy", "--rate", "3000", "--json")

    def done() -> int:
        return sum(int(path.stem.rpartition("-")[2]) for path in light.path.glob("_rsmq/batches/*.json"))

    def stored() -> int:
        return sum(light.raw("XLEN", light.keys.stream("copy", number)) for number in (0, 1))

    for words, state, most in ((archive, done, 299), (replay, stored, 6000)):
        Command(settings, *words).kill_when(lambda state=state: state() > 0, "it has done something")  # type: ignore[misc]
        assert state() < most
        code, _ = Command(settings, *words).wait()
        assert (code, state()) == (0, most)
    assert light.archived("orders") == list(range(6000))
    copied = [fields for part in light.entries("copy") for fields in part]
    assert sorted(int(fields[1][5:-1]) for fields in copied) == list(range(6000))
    for key in range(4):
        numbers = [int(fields[1][5:-1]) for fields in copied if fields[fields.index(b"key") + 1] == b"k%d" % key]
        assert numbers == list(range(key, 6000, 4))


def test_archive_that_died_before_it_told_retention_tells_it_with_nothing_new(
    light: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run has no message to archive, and still says how far the archive is."""
    light.add("orders", range(4))
    with monkeypatch.context() as patch:
        patch.setattr(by_arrow, "publish_offsets", lambda _, __, ends: crash() if ends else None)
        with pytest.raises(Crash):
            light.archive_by_arrow("orders")
    assert light.position("orders", 0) is None
    assert light.archive_by_arrow("orders").messages == 0
    assert light.position("orders", 0) == light.last_id("orders", 0)


def test_archive_says_what_was_lost_and_goes_on_when_it_may(light: Vault) -> None:
    """An error that names the option; with it the gap is in the archive, with partition, ids and number."""
    light.add("orders", range(20))
    light.archive_by_arrow("orders")
    light.add("orders", range(20, 40))
    light.server.xtrim(light.keys.stream("orders", 0), maxlen=3, approximate=False)
    with pytest.raises(DataLoss, match=r"expected 10, found 3: trimmed before read.*--accept-loss") as caught:
        light.archive_by_arrow("orders")
    assert "failOnDataLoss" not in str(caught.value)
    done = light.archive_by_arrow("orders", accepts_loss=True)
    assert (done.messages, done.missing) == (13, 7)
    (gap,) = light.light.gaps()
    assert (gap.topic, gap.partition, gap.expected, gap.missing) == ("orders", 0, 10, 7)
    assert gap.upto == light.last_id("orders", 0).decode()
    assert light.archive_by_arrow("orders").missing == 0


def test_archive_of_one_name_runs_once_at_a_time(light: Vault) -> None:
    """A second one ends at once and says why; another name is another archive."""
    light.add("orders", range(4))
    with exclusive(light.light.folder.address, "archive"):
        with pytest.raises(ConfigError, match=r"is at work in .*: wait until it has ended, or use another --name"):
            light.archive_by_arrow("orders")
        assert light.archive_by_arrow("orders", name="second").messages == 4
    assert light.archive_by_arrow("orders").messages == 4


def test_compact_makes_one_sorted_file_and_today_waits_for_some_batches(light: Vault) -> None:
    """Twice archived is once there; today is left alone until it has enough new batches."""
    light.add("orders", range(30))
    light.archive_by_arrow("orders", batch=10)
    light.archive_by_arrow("orders", name="second")
    today = datetime.now(UTC).date()
    assert compact(light.light, until=today, today=today, few=5).skipped == 1
    (day,) = compact(light.light, until=today, today=today, few=4).days
    assert (day.messages, day.duplicates, day.files_after) == (30, 30, 1)
    (part,) = light.light.parts(["orders"])
    rows = light.light.read([part], ["partition", "id_ms", "id_seq"]).to_pylist()
    order = [(row["partition"], row["id_ms"], row["id_seq"]) for row in rows]
    assert order == sorted(order)
    assert light.archived("orders") == list(range(30))
    assert compact(light.light, until=today).skipped == 1


async def test_replay_moves_expiries_and_leaves_out_what_was_cancelled(light: Vault, settings: Settings) -> None:
    """By the age of the message, or not at all, as asked; a cancelled and a replaced message come only if asked for."""
    light.server.xgroup_create(light.keys.stream("orders", 0), "g", "0", mkstream=True)
    async with Broker(settings) as broker:
        await broker.topics.ensure("orders", 1)
        await broker.publish("orders", b"1", expires="20s")
        await broker.publish("orders", b"2", expires=datetime.fromtimestamp(4e9, UTC), on_expiry="dead")
        await broker.cancel(await broker.publish("orders", b"3"))
        await broker.publish("orders", b"4", unique="u")
        await broker.publish("orders", b"5", unique="u", on_conflict="replace")

    def replay(to: str, **options: Any) -> dict[bytes, dict[bytes, bytes]]:
        light.make(to, 1)
        job = light.arrow_job("orders", to, **options)
        plan = job.plan()
        job.run(plan)
        (share,) = plan.shares
        assert (share.messages, share.cancelled) == ((5, 0) if options.get("with_cancelled") else (3, 2))
        assert share.expiring == 2
        return {fields[b"data"]: fields for _, fields in light.server.xrange(light.keys.stream(to, 0))}

    light.archive_by_arrow("orders")
    stored = int(light.server.xrange(light.keys.stream("orders", 0))[0][0].partition(b"-")[0])
    shifted = await to_thread(replay, "shifted")
    kept = await to_thread(replay, "kept", expiry="keep", with_cancelled=True)
    assert [*shifted] == [b"1", b"2", b"5"]
    assert int(kept[b"1"][b"expires"]) == stored + 20_000
    assert int(kept[b"2"][b"expires"]) == 4_000_000_000_000
    assert (kept[b"2"][b"on_expiry"], kept[b"4"][b"unique"]) == (b"dead", b"u")
    age = int(shifted[b"1"][b"expires"]) - int(kept[b"1"][b"expires"])
    assert age > 0
    assert abs(int(shifted[b"2"][b"expires"]) - 4_000_000_000_000 - age) < 1000
    assert not any(b"expires" in fields for fields in (await to_thread(replay, "dropped", expiry="drop")).values())


async def test_cancellation_after_the_archive_is_noted_by_its_next_run(
    light: Vault, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, also if a run is killed before; a replay leaves it out, and one that had begun before does not."""
    light.server.xgroup_create(light.keys.stream("orders", 0), "g", "0", mkstream=True)
    light.make("again", 1)
    async with Broker(settings) as broker:
        await broker.topics.ensure("orders", 1)
        refs = [await broker.publish("orders", b"%d" % number) for number in range(4)]
        light.archive_by_arrow("orders")
        begun = light.arrow_job("orders", "begun")
        plan = await to_thread(begun.plan)
        monkeypatch.setattr(begun, "_publish", crash)
        with pytest.raises(Crash):
            begun.run(plan)
        await broker.cancel(refs[1])
        with monkeypatch.context() as patch:
            patch.setattr(CancellationNotes, "note", crash)
            with pytest.raises(Crash):
                light.archive_by_arrow("orders")
        assert light.archive_by_arrow("orders").batches == 0
        light.archive_by_arrow("orders")
        assert len(light.light.notes()) == 1
        await broker.cancel(refs[2])
    light.archive_by_arrow("orders")
    rows = light.light.read(light.light.parts(["orders"]), ["offset", "cancelled"]).to_pylist()
    assert [row["cancelled"] for row in rows] == [None, "*", "*", None]
    job = light.arrow_job("orders", "again")
    (share,) = (await to_thread(job.plan)).shares
    assert (share.messages, share.cancelled) == (2, 2)
    (share,) = (await to_thread(light.arrow_job("orders", "begun").plan)).shares
    assert (share.messages, share.cancelled) == (4, 0)
    compact(light.light, until=datetime.now(UTC).date() + timedelta(days=1))
    (part,) = light.light.parts(["orders"])
    (file,) = light.light.files_of(part)
    assert [row["cancelled"] for row in pq.read_table(file).to_pylist()] == [None, "*", "*", None]


def test_replay_of_a_resized_topic_keeps_the_order_of_each_key(light: Vault) -> None:
    """A key came through partition 0, then through 1: all of it is published in the order of the stream ids."""
    light.make("orders")
    for number in range(1200):
        stream = light.keys.stream("orders", 0 if number < 700 else 1)
        light.server.xadd(stream, {"data": b"%d" % number, "key": f"k{number % 3}"}, f"{1000 + number}-0")
    light.archive_by_arrow("orders")
    light.make("copy", 1)
    job = light.arrow_job("orders", "copy")
    job.run(job.plan())
    (copied,) = light.entries("copy", 1)
    for key in range(3):
        numbers = [int(fields[1]) for fields in copied if fields[3] == b"k%d" % key]
        assert numbers == list(range(key, 1200, 3))


def test_both_engines_continue_the_same_archive(vault: Vault) -> None:
    """In turn, each continues where the other has ended; both count, compact and replay what the two have written."""
    vault.add("orders", range(10), h='{"a": "b"}')
    for number, run in enumerate((vault.archive, vault.archive_by_arrow, vault.archive), 1):
        vault.add("orders", range(10 * number, 10 * number + 10))
        assert run("orders").messages == (20 if number == 1 else 10)
    assert vault.archived("orders") == list(range(40))
    options = ReportOptions(("orders",), vault.connection, str(vault.path))
    light, heavy = count_by_arrow(options), count_by_spark(vault.store.spark, options)
    assert dataclasses.replace(light, latencies=()) == dataclasses.replace(heavy, latencies=())
    assert count_by_arrow(dataclasses.replace(options, archive=None)).volumes == light.volumes
    vault.make("copy")
    plan = vault.job("orders", "copy").plan()
    assert plan == vault.arrow_job("orders", "copy").plan()
    vault.job("orders", "copy").run(plan)
    assert vault.arrow_job("orders", "copy").plan().is_finished
    today = datetime.now(UTC).date()
    assert len(compact(vault.store, until=today).days) == 1
    vault.add("orders", range(40, 45))
    vault.archive_by_arrow("orders")
    assert len(compact(vault.light, until=today).days) == 1
    (part,) = vault.store.parts(["orders"])
    assert vault.store.read([part]).where("timestamp = timestamp_millis(id_ms) AND headers IS NOT NULL").count() == 10
    assert vault.archived("orders") == list(range(45))


def test_spark_keeps_the_order_of_a_resized_topic_and_the_gap(vault: Vault) -> None:
    """The same by Spark: one task for a topic whose keys have moved; what was lost is recorded and not read again."""
    vault.make("orders")
    for number in range(1200):
        stream = vault.keys.stream("orders", 0 if number < 700 else 1)
        vault.server.xadd(stream, {"data": b'{"n": %d}' % number, "key": f"k{number % 3}"}, f"{1000 + number}-0")
    vault.archive("orders")
    vault.make("copy", 1)
    (share,) = vault.replay("orders", "copy").shares
    assert share.is_resized
    (copied,) = vault.entries("copy", 1)
    numbers = [int(fields[1][6:-1]) for fields in copied if fields[3] == b"k1"]
    assert numbers == list(range(1, 1200, 3))
    vault.add("orders", range(1200, 1220))
    vault.server.xtrim(vault.keys.stream("orders", 1), maxlen=4, approximate=False)
    vault.light.folder.delete("_rsmq/checkpoints")  # without Spark's state the archive itself knows the count
    with pytest.raises(DataLoss, match=r"expected 10, found 4: trimmed before read.*--accept-loss"):
        vault.archive("orders")
    assert vault.archive("orders", accepts_loss=True).missing == 6
    assert [(gap.partition, gap.missing) for gap in vault.light.gaps()] == [(1, 6)]
    assert vault.archived("orders") == sorted({*range(1220)} - {*range(1201, 1213, 2)})


def test_engine_is_chosen_by_place_and_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow for a little on this machine; Spark for much, elsewhere, or where a Spark is named."""
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    path = "file:///data"
    found = [
        uses_spark("auto", None, path, lambda: False), uses_spark("auto", None, path, lambda: True),
        uses_spark("auto", None, "s3a://lake/x", lambda: False), uses_spark("auto", "local[2]", path, lambda: False),
        uses_spark("spark", None, path, lambda: False), uses_spark("arrow", None, path, lambda: True),
    ]  # fmt: skip
    assert found == [False, True, True, True, True, False]
    with pytest.raises(ConfigError, match=r"--master says where Spark runs"):
        uses_spark("arrow", "local", path, lambda: False)


def test_archive_with_a_damaged_file_names_it(light: Vault, tmp_path: Path) -> None:
    """One line with the file and what to do."""
    light.add("orders", range(4))
    light.archive_by_arrow("orders")
    part: Part = light.light.parts(["orders"])[0]
    (file,) = light.light.files_of(part)
    Path(file).write_bytes(b"damaged")
    with pytest.raises(RsmqError, match=r"part-00000\.parquet cannot be read as Parquet: it is damaged"):
        light.arrow_job("orders", "copy").plan()


def test_archive_on_a_full_disk_continues_with_more_room(settings: Settings, small_disk: Path) -> None:
    """One line; with more room the next run completes it, nothing twice."""
    light = Vault(None, small_disk / "archive", settings)
    for start in range(0, 1200, 400):
        light.add("orders", range(start, start + 400), padding=os.urandom(600).hex())
        light.server.xadd(
            light.keys.stream("orders", 0), {"data": b'{"n":%d}' % (5000 + start), "x": os.urandom(200_000)}
        )
    with pytest.raises(RsmqError, match=r"the disk is full.*run it again"):
        light.archive_by_arrow("orders")
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    light.archive_by_arrow("orders")
    assert light.archived("orders") == [*range(1200), 5000, 5400, 5800]
