"""Encoded and large payloads in reads, archives and replays: what the option `decode` gives, and what is said of it."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from rsmq import Broker, ConfigError, RsmqError, Settings
from rsmq.codecs import Encrypt, Keyring, Offload, Zstd
from rsmq.errors import BodyUnavailable
from rsmq.pipeline.format.columns import WITH_HEADERS
from rsmq.pipeline.format.options import read_options
from rsmq.pipeline.format.reader import BatchReader
from tests.contract.witness import Witness
from tests.pipeline.vault import Vault

KEY = b"K" * 32
IN_ENVIRONMENT = f"k1={base64.b64encode(KEY).decode()}"
LARGE = "call 010-1234-5678 " * 3000


@pytest.fixture
def bodies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store of bodies, which this machine knows."""
    monkeypatch.setenv("RSMQ_BODIES", str(tmp_path / "bodies"))
    return tmp_path / "bodies"


def broker_of(settings: Settings, bodies: Path, *, is_coded: bool = True) -> Broker:
    """One that encrypts, and puts more than 5 kB into the store."""
    codecs = [Zstd(above="1MiB"), Encrypt(Keyring({"k1": KEY}))] if is_coded else []
    more = {"prefix": settings.prefix, "preflight": "warn", "payload_limit": "20kB", "partitions": 2}
    return Broker(settings.url, codecs=codecs, offload=Offload(bodies, above="5kB"), **more)  # type: ignore[arg-type]


async def fill(broker: Broker) -> None:
    """Small and large messages, with and without a key, headers and codecs."""
    async with broker:
        for n in range(6):
            text = LARGE if n % 2 else "short"
            await broker.publish("orders", {"n": n, "x": text}, key=f"k{n % 3}", headers={"h": "1"} if n < 2 else None)


def rows_of(vault: Vault, **more: str) -> list[dict[str, Any]]:
    """The rows of a read, as an executor makes them from pickled options."""
    values = vault.connection | {"subscribe": "orders", "includeHeaders": "true"} | more
    parsed = read_options(values)
    object.__setattr__(parsed, "columns", tuple(WITH_HEADERS.names))
    reader = pickle.loads(pickle.dumps(BatchReader(parsed)))
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


async def test_a_read_decodes_with_the_keys_and_the_store_of_its_machine(
    light: Vault, settings: Settings, bodies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`all` gives what was published, `bodies` the ciphertext, and without the option rows are as they are stored."""
    await fill(broker_of(settings, bodies))
    stored = rows_of(light)
    assert {len(row["value"]) for row in stored if row["value"]} >= {32}
    assert all("enc" in {each["key"] for each in row["headers"]} for row in stored)
    brought = rows_of(light, decode="bodies")
    assert sorted(len(row["value"]) > 50_000 for row in brought) == [False] * 3 + [True] * 3
    assert not any(b"010-1234" in row["value"] for row in brought)
    monkeypatch.setenv("RSMQ_KEYS", IN_ENVIRONMENT)
    opened = rows_of(light, decode="all")
    assert sorted(json.loads(row["value"])["n"] for row in opened) == list(range(6))
    assert not any(each["key"] in ("enc", "ref", "rsmq.packed") for row in opened for each in row["headers"] or ())


async def test_what_a_machine_lacks_is_named_and_no_key_is_in_a_plan_or_an_error(
    light: Vault, settings: Settings, bodies: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A key, a store, or the folder of the store. The pickled reader and all texts are free of the key."""
    caplog.set_level(logging.DEBUG)
    await fill(broker_of(settings, bodies))
    with pytest.raises(ConfigError, match=r"needs the key k1.*RSMQ_KEYS") as without_key:
        rows_of(light, decode="all")
    monkeypatch.setenv("RSMQ_KEYS", IN_ENVIRONMENT)
    monkeypatch.delenv("RSMQ_BODIES")
    with pytest.raises(ConfigError, match=r"needs the store of bodies.*RSMQ_BODIES") as without_store:
        rows_of(light, decode="all")
    monkeypatch.setenv("RSMQ_BODIES", str(bodies.parent / "elsewhere"))
    with pytest.raises(BodyUnavailable, match="no folder of this server") as away:
        rows_of(light, decode="bodies")
    with pytest.raises(ConfigError, match="decode='keys' is not valid"):
        rows_of(light, decode="keys")
    values = light.connection | {"subscribe": "orders", "decode": "all"}
    pickled = pickle.dumps(BatchReader(read_options(values)))
    texts = [*map(repr, (without_key.value, without_store.value, away.value)), caplog.text, repr(pickled)]
    for secret in (KEY.decode(), IN_ENVIRONMENT, IN_ENVIRONMENT[3:]):
        assert not any(secret in text for text in texts)


@pytest.mark.parametrize("is_coded", [False, True], ids=["plain", "encrypted"])
async def test_an_archive_has_the_bodies_and_a_replay_puts_them_again(
    light: Vault, settings: Settings, bodies: Path, *, is_coded: bool, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When entries and bodies are gone: the copies have bodies of their own, and can be read with the key."""
    monkeypatch.setenv("RSMQ_PAYLOAD_LIMIT", "20kB")
    await fill(broker_of(settings, bodies, is_coded=is_coded))
    assert light.archive_by_arrow("orders").messages == 6
    for part in range(2):
        light.server.delete(light.keys.stream("orders", part))
    kept = next(bodies.glob("*/store")).parent
    shutil.rmtree(kept / "orders")
    job = light.arrow_job("orders", "copy")
    await asyncio.to_thread(lambda: job.run(job.plan()))
    copies = broker_of(settings, bodies, is_coded=is_coded)

    @copies.handler("copy", group="g")
    async def take(payload: dict[str, Any]) -> None:
        witness.note((payload["n"], len(payload["x"])))

    async with copies.running():
        await witness.sees([(n, len(LARGE) if n % 2 else 5) for n in range(6)])
    assert len([*(kept / "copy").iterdir()]) == 3


async def test_an_archive_without_the_store_stops_instead_of_losing_bodies(
    light: Vault, settings: Settings, bodies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the variable, and goes on where it was. A body that is lost stays a name."""
    await fill(broker_of(settings, bodies))
    monkeypatch.delenv("RSMQ_BODIES")
    with pytest.raises(ConfigError, match="RSMQ_BODIES"):
        light.archive_by_arrow("orders")
    assert light.position("orders", 0) is None
    monkeypatch.setenv("RSMQ_BODIES", str(bodies))
    min(bodies.glob("*/orders/*")).unlink()
    assert light.archive_by_arrow("orders").messages == 6
    rows = light.light.read(light.light.parts(["orders"]), ["value"]).column("value").to_pylist()
    assert sorted(len(row) > 50_000 for row in rows) == [False] * 4 + [True] * 2


async def test_an_archive_of_a_body_that_is_another_one_stops_until_it_is_right_or_gone(
    light: Vault, settings: Settings, bodies: Path
) -> None:
    """Nothing is committed. When the store answers as it should, all is archived; of what is deleted the name stays."""
    await fill(broker_of(settings, bodies))
    spoiled, other = sorted(bodies.glob("*/orders/*"))[:2]
    before = spoiled.read_bytes()
    spoiled.write_bytes(before[: len(before) // 2])
    other.write_bytes(b"another body")
    with pytest.raises(RsmqError, match=r"digest differs.*delete that object"):
        light.archive_by_arrow("orders")
    spoiled.write_bytes(before)
    with pytest.raises(RsmqError, match=r"digest differs.*delete that object"):
        light.archive_by_arrow("orders")
    other.unlink()
    light.archive_by_arrow("orders")
    rows = light.light.read(light.light.parts(["orders"]), ["value"]).column("value").to_pylist()
    assert sorted(len(row) > 50_000 for row in rows) == [False] * 4 + [True] * 2


async def test_spark_decodes_on_its_executors(spark: SparkSession, settings: Settings) -> None:
    """With the environment of its Python workers; the plan has no key and no address of the store."""
    bodies = Path(spark.conf.get("spark.local.dir") or "") / "bodies"
    await fill(broker_of(settings, bodies))
    options = {"url": settings.url or "", "prefix": settings.prefix, "subscribe": "orders", "decode": "all"}
    frame = spark.read.format("rsmq").options(**options).load()
    rows = await asyncio.to_thread(frame.selectExpr("cast(value as string) as text").collect)
    assert sorted(json.loads(row.text)["n"] for row in rows) == list(range(6))
    plan = frame._jdf.queryExecution().toString()
    assert not any(secret in plan for secret in (IN_ENVIRONMENT, IN_ENVIRONMENT[3:], str(bodies)))
