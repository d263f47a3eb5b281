"""Rows of files become messages or letters, each once, in the order of the file."""

from __future__ import annotations

import json
from asyncio import to_thread
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from rsmq.broker import Broker
from rsmq.errors import ConfigError, RsmqError
from rsmq.pipeline.report import Order as ReportOrder
from rsmq.pipeline.report import collect
from rsmq.pipeline.send import Order, Send
from rsmq.settings import Settings
from tests.pipeline.test_replay import canonical
from tests.pipeline.vault import Vault


@pytest.fixture
def vault(spark: SparkSession, settings: Settings, tmp_path: Path) -> Vault:
    """The shared server, and a directory."""
    return Vault(spark, tmp_path / "archive", settings)


@pytest.fixture
def audience(tmp_path: Path) -> str:
    """A CSV file of 300 rows, three for each customer."""
    path = tmp_path / "my audience.csv"
    rows = (f"{number},c{number % 100},{'ko' if number % 2 else 'de'},Hallo {number}" for number in range(300))
    path.write_text("\n".join(["number,customer,language,text", *rows]) + "\n")
    return str(path)


def send(vault: Vault, path: str, to: str, **options: Any) -> Send:
    """A send, not yet begun."""
    return Send(vault.spark, Order(path, to, **options), vault.connection)


def test_rows_become_messages_once(vault: Vault, audience: str) -> None:
    """A full topic cuts it off; run again it goes on; a third time does nothing; another job sends again."""
    vault.make("greetings")
    vault.server.hset(vault.keys.topic("greetings"), mapping={"max_length": 100})
    work = send(vault, audience, "greetings", key="customer", id="number")
    plan = work.plan()
    assert (plan.rows, plan.files) == (300, 1)
    assert json.loads(plan.examples[0]) == {"number": 0, "customer": "c0", "language": "de", "text": "Hallo 0"}
    with pytest.raises(RsmqError, match="holds 100 unsettled messages"):
        work.run()
    vault.server.hset(vault.keys.topic("greetings"), mapping={"max_length": 0})
    for _ in range(2):
        send(vault, audience, "greetings", key="customer", id="number").run()
    entries = [canonical(each) for part in vault.entries("greetings") for each in part]
    assert sorted(int(each[b"id"]) for each in entries) == list(range(300))
    for customer in range(100):
        of_key = [int(each[b"id"]) for each in entries if each[b"key"] == b"c%d" % customer]
        assert of_key == [customer, customer + 100, customer + 200]


def test_only_some_and_only_a_column(vault: Vault, audience: str) -> None:
    """A filter and a column as the payload: what was left out is not sent, and text stays text."""
    send(vault, audience, "texts", value="text", where="language = 'ko' AND number < 6").run()
    entries = [canonical(each) for part in vault.entries("texts", 8) for each in part]
    assert sorted(each[b"data"] for each in entries) == [b"Hallo 1", b"Hallo 3", b"Hallo 5"]


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("nothing.csv", {}, "there is no file"),
        ("", {"key": "custommer"}, "the file has no column 'custommer': it has number, customer, language, text"),
        ("", {"where": "nothing > 1"}, "--where 'nothing > 1' is not understood"),
    ],
)
def test_mistakes(vault: Vault, audience: str, path: str, options: dict[str, Any], message: str) -> None:
    """One line each, before anything is sent."""
    with pytest.raises(ConfigError, match=message):
        send(vault, path or audience, "greetings", **options).plan()


async def test_letters_into_inboxes(vault: Vault, audience: str, settings: Settings) -> None:
    """Each device gets its rows once and in order, however often it is sent; the report counts what waits."""
    for _ in range(2):
        send(vault, audience, "alerts", device="customer", value="text").run()
    async with Broker(settings) as broker, broker.connect("c7") as session:
        letters = []
        async for letter in session:
            letters.append((letter.topic, letter.data))
            await session.ack(letter)
            if len(letters) == 3:
                break
    assert letters == [("alerts", b"Hallo 7"), ("alerts", b"Hallo 107"), ("alerts", b"Hallo 207")]
    vault.make("orders")
    backlog = (await to_thread(collect, vault.spark, ReportOrder(("orders",), vault.connection))).backlog
    assert backlog is not None
    assert (backlog.devices, backlog.letters) == (100, 297)
    assert dict(backlog.steps)[10] == 99
