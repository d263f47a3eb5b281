"""Secrets planted in messages, rows and addresses: Spark shows them in no plan, and no error has them.

What a query of the user says, and what Spark says of it, is the user's own (docs/security.md).
"""

from __future__ import annotations

import asyncio
import json
import logging
from base64 import b64encode
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from rsmq import Broker, RsmqError, Settings
from rsmq.codecs import Encrypt, Keyring
from rsmq.pipeline import typed_rows
from tests.pipeline.vault import Vault
from tests.security.test_planted import MARK, Card, leaks, said

KEYS = Keyring({"k1": b"K" * 32})
"""The one that the Python workers of the tests have."""
ROWS = "key string, value string, topic string, id string, band string, device string"


async def test_no_plan_of_spark_shows_a_payload_or_a_key(
    spark: SparkSession, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a read that decodes, with columns of a type, and after a filter that is pushed to the source."""
    caplog.set_level(logging.DEBUG)
    async with Broker(settings, codecs=[Encrypt(KEYS)]) as broker:
        await broker.publish("cards", {"owner": MARK, "limits": {MARK: 1}}, headers={"token": MARK})
    options = {"url": settings.url or "", "prefix": settings.prefix, "subscribe": "cards", "decode": "all"}
    frame = spark.read.format("rsmq").options(**options, includeHeaders="true").load()
    typed = typed_rows(frame, Card).where("partition >= 0")
    (row,) = await asyncio.to_thread(typed.select("payload.*", "headers").collect)
    assert row.owner == MARK
    plans = [each._jdf.queryExecution().toString() for each in (frame, typed)]
    assert all("rsmq" in each for each in plans)
    assert leaks(*plans, caplog.text) == []
    assert not [each for each in (*plans, caplog.text) if b64encode(b"K" * 32).decode()[3:20] in each]


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ((None, None, "cards", "m", None, None), {}),
        (("k", MARK, None, "m", None, None), {}),
        (("k", MARK, "cards", "m", f"{MARK}-band", None), {}),
        (("k", MARK, "cards", None, None, None), {"idempotence": "dedupe"}),
        (("k", MARK, None, None, None, None), {"target": "inbox", "topic": "cards"}),
        (("k", None, None, None, None, "d"), {"target": "inbox", "topic": "cards"}),
    ],
)
def test_no_error_of_a_write_shows_a_row(
    spark: SparkSession, vault: Vault, row: tuple[Any, ...], options: dict[str, str]
) -> None:
    """A row without a value, a topic, a device or an id; a band that the topic does not have."""
    vault.make("cards")
    frame = spark.createDataFrame([row], ROWS)
    plan = frame._jdf.queryExecution().toString()
    with pytest.raises(PySparkException) as caught:
        frame.write.format("rsmq").options(**vault.connection, **options).mode("append").save()
    text = "\n".join((said(caught.value), plan)).replace(f"{MARK}-band", "the band")
    assert leaks(text) == []


def test_no_error_of_a_job_shows_a_payload_that_its_filter_cannot_compare(vault: Vault) -> None:
    """Spark says the value that is no number."""
    vault.add("cards", range(3))
    vault.raw("XADD", vault.keys.stream("cards", 0), "*", "data", json.dumps({"n": f"{MARK}-n"}), "id", "x")
    vault.archive("cards")
    with pytest.raises(RsmqError) as caught:
        vault.replay("cards", "again", where="get_json_object(value, '$.n') > 5")
    assert "Spark failed: [CAST_INVALID_INPUT]" in str(caught.value)
    assert leaks(said(caught.value)) == []


def test_no_address_with_a_password_is_in_a_plan_or_an_error(spark: SparkSession) -> None:
    """It is refused, and the refusal does not repeat it."""
    for use in (
        lambda: spark.read.format("rsmq").options(url=f"redis://:{MARK}@127.0.0.1:1/0", subscribe="t").load().count(),
        lambda: spark.range(1).selectExpr("'v' as value").write.format("rsmq").mode("append")
        .options(url=f"redis://ada:{MARK}@127.0.0.1:1/0", topic="cards").save(),
    ):  # fmt: skip
        with pytest.raises(PySparkException) as caught:
            use()
        assert "password" in said(caught.value)
        assert leaks(said(caught.value)) == []
