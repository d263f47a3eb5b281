"""Nothing grows without bound: the table of docs/robustness.md, and what it needs beside the tests it names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from rsmq import Broker, Settings
from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.outboxes import CountedOutbox, read_outboxes, report_outbox
from rsmq.redis.scripts import LEAD_WORK
from rsmq.redis.streams import delete_group, ensure_groups
from tests.robustness.records import HASHES, SETS, SEVERAL, STREAMS, STRINGS, ZSETS

PAGE_OF_DOCS = (Path(__file__).parents[2] / "docs" / "robustness.md").read_text(encoding="utf-8")


def test_every_kind_of_record_is_in_the_table_with_its_bound() -> None:
    """A new kind of key comes with what bounds it."""
    table = PAGE_OF_DOCS.partition("## What grows")[2].partition("\n## ")[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", "".join(line.split("|")[1:2]))}
    assert named >= (HASHES | SETS | ZSETS | STREAMS | STRINGS | SEVERAL)


async def test_a_deleted_group_leaves_no_field_behind(settings: Settings) -> None:
    """Groups with ever new names do not fill the records of their partitions."""
    async with Broker(replace(settings, preflight="warn", partitions=1)) as broker:
        topic, keys, ask = await broker.topics.ensure("orders"), broker.keys, broker.client.execute_command
        for number in range(3):
            await ensure_groups(broker.client, keys, topic, f"g{number}")
            await ask("HSET", keys.removed("orders", 0), f"seen|g{number}", 1)
            await delete_group(broker.client, keys, topic, f"g{number}")
            assert await ask("PTTL", keys.lease("orders", 0, f"g{number}")) > 0
        assert await ask("HLEN", keys.removed("orders", 0)) == 0


async def test_leaders_and_outboxes_that_are_gone_are_forgotten(client: Client, keys: Keys) -> None:
    """A database that is gone leaves neither."""
    await LEAD_WORK(client, (keys.leader("outbox.db"),), ("me", 6000, 0))
    assert 0 < await client.execute_command("PTTL", keys.leader("outbox.db")) <= 7 * 86_400_000
    counted = CountedOutbox("shop", 1, 2.0, 0, "me")
    await client.execute_command("HSET", keys.outboxes, "gone", b'{"database":"x","at_ms":5}', "foreign", b"\xff")
    await report_outbox(client, keys, "db", counted)
    assert await client.execute_command("HLEN", keys.outboxes) == 1
    assert [each.id for each in await read_outboxes(client, keys)] == ["db"]
