"""Rows of files become messages or letters, each once, in the order of the file."""

from __future__ import annotations

import json
from asyncio import to_thread
from pathlib import Path
from typing import Any

import pytest

from rsmq.broker import Broker
from rsmq.errors import ConfigError, RsmqError
from rsmq.model.layout import single
from rsmq.model.settings import Settings
from rsmq.pipeline.jobs.send import SendJob, SendOptions
from rsmq.pipeline.report.report import ReportOptions, collect
from tests.pipeline.test_replay import canonical
from tests.pipeline.vault import Vault


@pytest.fixture
def audience(tmp_path: Path) -> str:
    """A CSV file of 300 rows, three for each customer."""
    path = tmp_path / "my audience.csv"
    rows = (f"{number},c{number % 100},{'ko' if number % 2 else 'de'},Hallo {number}" for number in range(300))
    path.write_text("\n".join(["number,customer,language,text", *rows]) + "\n")
    return str(path)


def send(vault: Vault, path: str, to: str, **options: Any) -> SendJob:
    """A send that has not started."""
    return SendJob(vault.spark, SendOptions(path, to, **options, is_plain=True), vault.connection)


def test_send_interrupted_sends_each_row_once(vault: Vault, audience: str) -> None:
    """A full topic interrupts it; the second run continues; the third does nothing; another job sends again."""
    vault.make("greetings")
    vault.server.hset(vault.keys.topic("greetings"), mapping={"max_length": 100})
    work = send(vault, audience, "greetings", key="customer", id="number")
    plan = work.plan()
    assert (plan.rows, plan.files) == (300, 1)
    assert json.loads(plan.examples[0]) == {"number": 0, "customer": "c0", "language": "de", "text": "Hallo 0"}
    with pytest.raises(RsmqError, match="holds 100 unsettled messages"):
        work.run()
    vault.server.hset(vault.keys.topic("greetings"), mapping={"max_length": 0})
    rest, nothing = (send(vault, audience, "greetings", key="customer", id="number").run() for _ in range(2))
    assert (sum(rest), rest.stored > 0, rest.skipped > 0) == (300, True, True)
    assert nothing == (0, 300)
    entries = [canonical(each) for part in vault.entries("greetings") for each in part]
    assert sorted(int(each[b"id"]) for each in entries) == list(range(300))
    for customer in range(100):
        of_key = [int(each[b"id"]) for each in entries if each[b"key"] == b"c%d" % customer]
        assert of_key == [customer, customer + 100, customer + 200]


def test_send_with_where_and_value_sends_these_rows_as_text(vault: Vault, audience: str) -> None:
    """A filter and a column as the payload: what was left out is not sent, and text stays text. All go to a band."""
    vault.make("texts", 1)
    layout = single(1).with_bands(("urgent", "normal", "bulk")).opened()
    vault.server.hset(vault.keys.topic("texts"), "layout", layout.to_text())
    send(vault, audience, "texts", value="text", where="language = 'ko' AND number < 6", band="bulk").run()
    normal, urgent, bulk = vault.entries("texts", 3)
    assert normal == urgent == []
    entries = [canonical(each) for each in bulk]
    assert sorted(each[b"data"] for each in entries) == [b"Hallo 1", b"Hallo 3", b"Hallo 5"]


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("nothing.csv", {}, "there is no file"),
        ("", {"key": "custommer"}, "the file has no column 'custommer': it has number, customer, language, text"),
        ("", {"band": "Bulk!"}, "'Bulk!' is no name of a band"),
        ("", {"where": "nothing > 1"}, "--where 'nothing > 1' is not valid SQL"),
    ],
)
def test_send_refuses_wrong_options_before_it_sends(
    vault: Vault, audience: str, path: str, options: dict[str, Any], message: str
) -> None:
    """One line each, before anything is sent."""
    with pytest.raises(ConfigError, match=message):
        send(vault, path or audience, "greetings", **options).plan()


async def test_send_to_devices_stores_each_letter_once_in_order(
    vault: Vault, audience: str, settings: Settings
) -> None:
    """Each device gets its rows once and in order, however often it is sent; the report counts what waits."""
    for expected in ((300, 0), (0, 300)):
        assert send(vault, audience, "alerts", device="customer", value="text").run() == expected
    async with Broker(settings) as broker, broker.connect("c7") as session:
        letters = []
        async for letter in session:
            letters.append((letter.topic, letter.data))
            await session.ack(letter)
            if len(letters) == 3:
                break
    assert letters == [("alerts", b"Hallo 7"), ("alerts", b"Hallo 107"), ("alerts", b"Hallo 207")]
    vault.make("orders")
    backlog = (await to_thread(collect, vault.spark, ReportOptions(("orders",), vault.connection))).backlog
    assert backlog is not None
    assert (backlog.devices, backlog.letters) == (100, 297)
    assert dict(backlog.steps)[10] == 99
