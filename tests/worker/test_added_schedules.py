"""Schedules that no code has, beside records that another client has spoiled: each costs itself."""

from __future__ import annotations

import logging

import pytest

from rsmq import Broker, Settings
from rsmq.control.schedules import entry_of
from tests.contract.witness import ask
from tests.patience import until

SPOILED = (b"\xff", b"{}", b"[]", b"7", b'{"payload": 7, "type": []}', b'{"payload": "!", "type": "text/plain"}')


@pytest.mark.parametrize("spoiled", SPOILED, ids=repr)
async def test_a_spoiled_schedule_costs_itself(
    server_url: str, prefix: str, spoiled: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Its definition is none; beside it one whose topic takes no message, and one that is well."""
    broker, found = Broker(Settings(url=server_url, prefix=prefix, preflight="warn")), list[int]()

    @broker.handler("ticks", group="g", partitions=1)
    async def note(n: int) -> None:
        found.append(n)

    async with broker:
        schedules = broker.schedules
        await broker.topics.ensure("broken", 1)
        await ask(broker, "SET", broker.keys.stream("broken", 0), "no stream")
        await broker.topics.ensure("ticks", 1)
        await schedules.upsert("refused", "100ms", "broken", 2)
        await schedules.upsert("spoiled", "100ms", "ticks", 1)
        await schedules.upsert("well", "100ms", "ticks", 3)
        await ask(broker, "HSET", broker.keys.every("ticks", 0), "added|spoiled", spoiled)
        await ask(broker, "ZADD", broker.keys.schedules, 0, entry_of("ticks", "spoiled", None), 0, b"\xff|\xff")
        with caplog.at_level(logging.WARNING, "rsmq.schedule"):
            async with broker.running():
                await until(lambda: len(found) >= 3, "the one that is well ticks")
                await until(lambda: any("refused of broken" in each for each in said(caplog)), "the other one is named")
    assert set(found) == {3}
    assert sum("spoiled of ticks" in each for each in said(caplog)) == 1


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log has about schedules."""
    return [record.getMessage() for record in caplog.records if record.name == "rsmq.schedule"]
