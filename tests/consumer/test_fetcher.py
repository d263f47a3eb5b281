"""The fetcher on its own: what keeps it reading while the server is away."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from rsmq.consumer import fetcher as fetcher_module
from rsmq.consumer.fetcher import Fetcher
from rsmq.consumer.queue import Queue
from rsmq.model.settings import Settings
from rsmq.redis.connector import Connector
from rsmq.testing.server import free_port
from tests.consumer.test_queue import make_context
from tests.patience import until


async def test_fetcher_survives_a_long_outage(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, no_task_left: None
) -> None:
    """It still retries after 1 100 refused connections: a pause of 2**1024 would be too large for a float."""
    monkeypatch.setattr(fetcher_module, "LONGEST_PAUSE", 0.0)
    caplog.set_level(logging.DEBUG, "rsmq.fetch")
    settings = Settings(url=f"redis://127.0.0.1:{free_port()}")
    assert settings.url is not None
    client = Connector(settings.url, settings).client()
    runner: Any = SimpleNamespace(retries=asyncio.Event(), queue=Queue(is_ordered=True))
    unused: Any = None
    fetcher = Fetcher(make_context(client, settings), runner, unused, unused)
    async with anyio.create_task_group() as tasks:
        await tasks.start(fetcher.run)
        await until(lambda: len(caplog.records) > 1100, "1 100 attempts have failed")
        tasks.cancel_scope.cancel()
    assert [record.levelname for record in caplog.records if record.name == "rsmq.fetch"].count("WARNING") == 1
    await client.aclose()
