"""A replay publishes what was archived: the same messages in the same order, each once, also when it is interrupted."""

from __future__ import annotations

import os
import shutil
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from rsmq.errors import ConfigError, RsmqError
from rsmq.model.packing import pack_fields
from rsmq.model.settings import Settings
from rsmq.pipeline.jobs.compact import compact
from tests.pipeline.vault import Fields, Vault
from tests.servers import Server

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"where": "no_such_column = 1"}, "--where .* is not valid SQL"),
    ({"where": "key ="}, "--where .* is not valid SQL"),
    ({"job": "a b"}, "job name 'a b' is not allowed"),
]


@pytest.fixture(scope="module")
def finished(spark: SparkSession, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of 30 messages, for those that copy it."""
    settings = Settings(url=server.url, prefix=f"t{uuid.uuid4().hex[:12]}")
    vault = Vault(spark, tmp_path_factory.mktemp("finished"), settings)
    vault.add("orders", range(30))
    vault.archive("orders")
    return vault.path


@pytest.fixture
def copied(vault: Vault, finished: Path) -> Vault:
    """A copy of that."""
    shutil.copytree(finished, vault.path)
    return vault


def canonical(fields: Fields) -> dict[bytes, bytes]:
    """The fields of an entry by name."""
    return dict(zip(fields[::2], fields[1::2], strict=True))


def numbers(entries: list[list[Fields]]) -> list[int]:
    """Which messages of `Vault.add` there are."""
    return sorted(int(fields[fields.index(b"data") + 1][5:-1]) for partition in entries for fields in partition)


def test_replay_publishes_the_same_entries_in_the_same_order(vault: Vault) -> None:
    """Bytes, keys, ids, types, headers, fields of others and malformed entries are the same, in the same order."""
    vault.add("orders", range(40))
    vault.add("orders", range(40, 60), h='{"tenant":"x","grüß":"주문"}', type="text/plain")
    stream = vault.keys.stream("orders", 0)
    odd = [
        ("data", b"\x00\xff\xfe", "key", b"\xff\x00"),
        ("data", b"", "trace", b"\x80"),
        ("no-data", b"x"),
        ("data", b"1", "group", b"billing", "id", b"again"),
        ("data", b"1", "h", b"not json"),
    ]
    for fields in odd:
        vault.raw("XADD", stream, "*", *fields)
    vault.archive("orders")
    plan = vault.replay("orders", "copy")
    vault.make("copy")
    assert plan.messages == 65
    before, after = vault.entries("orders"), [each for part in vault.entries("copy", 8) for each in part]
    assert sorted(pack_fields(sorted_fields(each)) for part in before for each in part) == sorted(
        pack_fields(sorted_fields(each)) for each in after
    )
    for key in (b"k0", b"k1", b"k2", b"k3"):
        assert of_key([each for part in before for each in part], key) == of_key(after, key)


def sorted_fields(fields: Fields) -> list[bytes]:
    """Pairs by name."""
    return [part for pair in sorted(zip(fields[::2], fields[1::2], strict=True)) for part in pair]


def of_key(entries: list[Fields], key: bytes) -> list[bytes]:
    """The payloads of a key, in order."""
    return [each[b"data"] for each in map(canonical, entries) if each.get(b"key") == key]


def test_replay_filters_by_time_key_and_sql(copied: Vault) -> None:
    """By time, by key, by SQL in which payloads are text; a dry run counts the same and changes nothing."""
    rows = copied.store.read(copied.store.parts(["orders"])).where("partition = 0").orderBy("id_ms", "id_seq").collect()
    late = datetime.fromtimestamp(rows[10].id_ms / 1000, UTC)
    assert copied.job("orders", "copy", keys=("k1", "k2")).plan().messages == 15
    assert copied.job("orders", "copy", where="get_json_object(value, '$.n') < 7 AND key <> 'k0'").plan().messages == 5
    before, after = copied.job("orders", "copy", until=late).plan(), copied.job("orders", "copy", since=late).plan()
    assert before.messages + after.messages == 30
    assert copied.job("orders", "copy", until=late - timedelta(days=1)).plan().messages == 0
    assert not copied.server.exists(copied.keys.topic("copy"))
    assert copied.replay("orders", "copy", keys=("k1",)).shares[0].keys == 1
    assert numbers(copied.entries("copy", 8)) == [number for number in range(30) if number % 4 == 1]


def test_replay_refuses_wrong_options_before_it_publishes(copied: Vault) -> None:
    """A filter or name that cannot be is refused before anything is published."""
    for options, message in MISTAKES:
        with pytest.raises(ConfigError, match=message):
            copied.replay("orders", "copy", **options)
    with pytest.raises(ConfigError, match="the archive has no topic 'order': it has orders"):
        copied.replay("order", "copy")
    assert not copied.server.exists(copied.keys.topic("copy"))


def test_replay_interrupted_into_a_live_topic_publishes_each_message_once(vault: Vault) -> None:
    """The topic is full half-way. Meanwhile others publish, the archive grows and is compacted: still each once."""
    vault.add("orders", range(60))
    vault.archive("orders", batch=30)
    vault.make("copy")
    vault.server.hset(vault.keys.topic("copy"), mapping={"max_length": 20})
    with pytest.raises(RsmqError, match="holds 20 unsettled messages"):
        vault.replay("orders", "copy")
    published = numbers(vault.entries("copy"))
    assert 0 < len(published) < 60
    vault.server.hset(vault.keys.topic("copy"), mapping={"max_length": 0})
    vault.add("copy", [1000, 1001])
    vault.add("orders", range(60, 70))
    vault.archive("orders")
    compact(vault.store, until=datetime.now(UTC).date())
    plan = vault.replay("orders", "copy")
    assert (plan.messages, plan.is_begun, plan.is_finished) == (60, True, False)
    assert numbers(vault.entries("copy")) == [*range(60), 1000, 1001]
    for key in (b"k0", b"k1", b"k2", b"k3"):
        entries = [each for part in vault.entries("copy") for each in part if len(canonical(each)[b"id"]) < 5]
        assert of_key(entries, key) == [b'{"n":%d}' % number for number in range(60) if b"k%d" % (number % 4) == key]
    assert vault.replay("orders", "copy").is_finished
    assert len(numbers(vault.entries("copy"))) == 62


def test_replay_job_runs_once_and_stands_for_one_thing(copied: Vault) -> None:
    """The same replay under another name publishes again; one name cannot stand for two things."""
    copied.replay("orders", "copy", job="first")
    copied.replay("orders", "copy", job="second")
    assert numbers(copied.entries("copy", 8)) == sorted([*range(30)] * 2)
    with pytest.raises(ConfigError, match="job 'first' has replayed something else"):
        copied.replay("orders", "copy", job="first", keys=("k1",))


def test_replay_of_a_damaged_file_names_it_and_publishes_nothing(copied: Vault) -> None:
    """The file is named, and nothing is published."""
    file = next(copied.path.glob("topic=orders/*/*/*.parquet"))
    data = bytearray(file.read_bytes())
    data[4 : len(data) // 2] = os.urandom(len(data) // 2 - 4)
    file.write_bytes(data)
    file.with_name(f".{file.name}.crc").unlink()
    with pytest.raises(RsmqError, match=f"{file.name} cannot be read as Parquet: it is damaged"):
        copied.replay("orders", "copy")
    file.write_bytes(b"PAR1")
    with pytest.raises(RsmqError, match=f"{file.name} cannot be read as Parquet: it is damaged"):
        copied.replay("orders", "copy")
    assert not copied.server.exists(copied.keys.topic("copy"))
