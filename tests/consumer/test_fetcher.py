"""The fetcher on its own: what keeps it reading while the server is away."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from rsmq.consumer.reading import fetcher as fetcher_module
from rsmq.consumer.reading.fetcher import Fetcher
from rsmq.consumer.waiting.queue import Queue
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Connector
from tests.consumer.test_queue import make_context
from tests.outage import LongBackoff, refused
from tests.patience import until


async def test_fetcher_survives_a_long_outage(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, no_task_left: None
) -> None:
    """It still retries after 1 030 refused connections: a pause of 2**1024 would be too large for a float."""
    monkeypatch.setattr(fetcher_module, "LONGEST_PAUSE", 0.0)
    monkeypatch.setattr(fetcher_module, "Backoff", LongBackoff)
    caplog.set_level(logging.DEBUG, "rsmq.fetch")
    with refused() as url:
        settings = Settings(url=url)
        client = Connector(url, settings).client()
        runner: Any = SimpleNamespace(retries=asyncio.Event(), queue=Queue(is_ordered=True))
        unused: Any = None
        fetcher = Fetcher(make_context(client, settings), runner, unused, unused)
        async with anyio.create_task_group() as tasks:
            await tasks.start(fetcher.run)
            await until(lambda: len(caplog.records) > 30, "30 attempts have failed")
            tasks.cancel_scope.cancel()
        await client.aclose()
    assert [record.levelname for record in caplog.records if record.name == "rsmq.fetch"].count("WARNING") == 1
