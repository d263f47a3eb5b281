"""A report says what happened and how things stand, and nothing that it shows can steer a browser."""

from __future__ import annotations

import re
from asyncio import to_thread
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq.broker import Broker
from rsmq.errors import RsmqError
from rsmq.handler.retry import Reject, Retry
from rsmq.model.message import Message
from rsmq.model.message_ref import MessageRef
from rsmq.model.settings import Settings
from rsmq.pipeline.report.data import InboxBacklog, PartitionCounts, ReportData, TrafficHistory, jain, percentile
from rsmq.pipeline.report.page import page, write_page
from rsmq.pipeline.report.report import ReportOptions, collect
from tests.contract.witness import settled
from tests.patience import until
from tests.pipeline.vault import Vault

EVIL = "<script>alert('x')</script>$a_1$"
NOTHING = TrafficHistory(None, None, timedelta(seconds=1), (), (), (), ())


def report_of(**changed: object) -> ReportData:
    """A report of nothing, but for what a test gives."""
    known: dict[str, object] = {
        "made_at": datetime.now(UTC), "server": "redis://h", "source": "the topics", "history": NOTHING, "groups": (),
        "deaths": (), "backlog": None,
    }  # fmt: skip
    return ReportData(**{**known, **changed})  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_jain_index_lies_between_an_nth_and_one(loads: list[float]) -> None:
    """Between 1/n and 1, and 1 for equal loads."""
    assert 1 / len(loads) - 1e-9 <= jain(loads) <= 1 + 1e-9
    assert jain([7] * len(loads)) == pytest.approx(1)
    assert jain([0] * 3 + [5]) == pytest.approx(1 / 4)


def test_percentile_is_the_nearest_rank() -> None:
    """Nearest rank, also of one value and of none."""
    assert [percentile(range(100), part) for part in (0, 0.5, 0.99, 1)] == [0, 50, 99, 99]
    assert (percentile([3], 0.5), percentile([], 0.5)) == (3, 0)


async def test_report_shows_what_a_worker_did(vault: Vault, settings: Settings, tmp_path: Path) -> None:
    """Volume, hot keys, dead letters with their reason, members and their load: as they were, on one page."""
    async with Broker(settings) as broker:
        await broker.topics.ensure("orders", 2)

        @broker.handler("orders", group="billing")
        async def bill(payload: dict[str, int], message: Message) -> None:
            if payload["n"] % 10 == 0:
                raise Reject(EVIL)

        for number in range(60):
            await broker.publish("orders", {"n": number}, key=EVIL if number < 40 else f"k{number}")
        async with broker.running():
            await settled(broker, "orders")
            found = await to_thread(collect, vault.spark, ReportOptions(("orders",), vault.connection))
    assert found.history.messages == 60
    assert sum(latency.measured for latency in found.history.latencies) == 60
    assert all(0 <= latency.p50 <= latency.p99 for latency in found.history.latencies)
    assert (found.history.hot_keys[0].key, found.history.hot_keys[0].messages) == (EVIL, 40)
    (death,) = found.deaths
    assert (death.reason, death.letters, death.example) == ("rejected", 6, EVIL)
    (group,) = found.groups
    assert (group.name, group.unread, group.pending, group.waiting, group.dead_letters) == ("billing", 0, 0, None, 6)
    assert (sum(load.messages for load in group.loads), group.jain) == (60, 1.0)
    path = write_page(found, str(tmp_path / "report.html"))
    text = path.read_text()
    assert "&lt;script&gt;" in text
    assert "<script" not in text
    assert "http://" not in text.replace("http://www.w3.org/", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    for svg in text.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")
    assert text.count("<svg") >= 5


async def test_message_that_waits_for_its_retry_is_counted_once(settings: Settings) -> None:
    """With key order the server has it as pending, too."""
    broker = Broker(settings)

    @broker.handler("orders", group="billing")
    async def bill(payload: dict[str, int]) -> None:
        raise Retry(after="1h")

    async with broker.running():
        ref = await broker.publish("orders", {"n": 1}, key="a")
        await broker.publish("orders", {"n": 2}, key="a")
        await until(lambda: is_parked(broker, ref), "it waits for its retry")
        connection = {"url": settings.url or "", "prefix": settings.prefix}
        found = await to_thread(collect, None, ReportOptions(("orders",), connection))
    (group,) = found.groups
    assert (group.unread + group.pending, group.waiting_for_retry) == (1, 1)
    assert re.search(r">\s*2\s*<[^>]*>\s*(<[^>]*>\s*)*not settled now", page(found))


async def is_parked(broker: Broker, ref: MessageRef) -> bool:
    """Whether a message waits for a retry."""
    found = (await broker.look(ref)).group("billing")
    return found is not None and found.state == "waiting_for_retry"


def test_report_shows_the_partitions_of_a_topic_that_was_resized_on_a_cluster() -> None:
    """Their numbers are far apart. Before, the picture had a column for each number between them."""
    counts = PartitionCounts.of("orders", {0: 4, 2: 4, 1_148_211: 2})
    assert (counts.numbers, counts.messages) == ((0, 1, 2, 1_148_211), (4, 0, 4, 2))
    assert "1148211" in page(report_of(history=replace(NOTHING, spreads=(counts,))))


def test_report_counts_the_archive_within_a_window(vault: Vault) -> None:
    """Only topics and times that were asked for, each message once, though two archives have it."""
    vault.add("orders", range(20))
    vault.add("bills", range(5))
    vault.archive("orders", "bills")
    vault.archive("orders", name="second")
    whole = collect(vault.spark, ReportOptions((), vault.connection, str(vault.path)))
    assert whole.history.messages == 25
    assert [spread.messages for spread in whole.history.spreads] == [(3, 2), (10, 10)]
    assert whole.history.latencies == (), "ids that are no UUIDv7 do not say when they were made"
    later = datetime.now(UTC) + timedelta(days=1)
    assert (
        collect(
            vault.spark, ReportOptions(("orders",), vault.connection, str(vault.path), since=later)
        ).history.messages
        == 0
    )
    with pytest.raises(RsmqError, match="there is no archive at"):
        collect(vault.spark, ReportOptions((), vault.connection, str(vault.path / "nothing")))


def test_page_shows_devices_by_waiting_letters() -> None:
    """Devices by the letters that wait for them, the longest inboxes named."""
    steps = ((0, 5), (1, 2), (10, 1), (100, 0), (1000, 0), (None, 1))
    text = page(report_of(backlog=InboxBacklog(9, 3, 2042, 7, steps, ((EVIL, 2000),))))
    for shown in ("9 devices, 3 connected", "2–10", "over 1000", "2 000", "&lt;script&gt;"):
        assert shown in text


def test_page_of_an_empty_queue_is_a_page() -> None:
    """An empty queue makes a page, too."""
    assert "no message in the window" in page(report_of())


def test_write_page_names_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """One line that names the file."""
    with pytest.raises(RsmqError, match=r"nowhere/report.html cannot be written: No such file"):
        write_page(report_of(), str(tmp_path / "nowhere" / "report.html"))
