"""The endpoint inside a service of its own: as a lifespan of the broker."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import anyio.to_thread
import pytest

from rsmq import Broker, Message, Settings, TopicFull
from rsmq.telemetry import MessageFilter, note_messages
from rsmq.telemetry.endpoint import Endpoint
from tests.patience import until
from tests.telemetry.conftest import EndpointClient


async def test_endpoint_runs_inside_a_service(server_url: str, prefix: str) -> None:
    """It answers while the worker runs, counts what this process publishes, and times a batch as one call."""
    full = Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1, max_length=5)
    broker, seen, go = Broker(full), list[Any](), asyncio.Event()

    @broker.handler("orders", group="billing", batch=10, concurrency=1)
    async def bill(orders: list[dict[str, Any]]) -> None:
        seen.extend(orders)
        await go.wait()

    endpoint = Endpoint(broker, "127.0.0.1:0")
    broker.lifespan(endpoint.serving)
    async with broker.running():
        assert endpoint.address is not None
        client = EndpointClient(endpoint.address.port)
        await broker.publish("orders", {})
        await until(lambda: seen, "the first has come")
        with pytest.raises(TopicFull):
            await broker.publish_many("orders", [{}] * 9)
        series = await anyio.to_thread.run_sync(client.series)
        assert series["rsmq_messages_published_total{topic=orders}"] == 5
        assert series["rsmq_publish_failures_total{topic=orders}"] == 5
        assert series["rsmq_handlers_busy{group=billing,topic=orders}"] == 1
        assert 0 < series["rsmq_handler_longest_seconds{group=billing,topic=orders}"] < 20
        go.set()
        await until(lambda: len(seen) == 5, "all have come")
        status, report = await anyio.to_thread.run_sync(client.probe, "/readyz")
        assert (status, report["member"]) == (200, broker.worker and broker.worker.member)
    assert (await anyio.to_thread.run_sync(client.get, "/livez"))[0] == 0


async def test_log_filter_knows_the_message_inside_a_handler_only(
    server_url: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The filter gives records of a task that a handler starts its message, and None to what is about no message."""
    broker, done = Broker(Settings(url=server_url, prefix=prefix, preflight="warn")), asyncio.Event()
    note_messages(broker)
    caplog.handler.addFilter(MessageFilter())
    log = logging.getLogger("app")

    @broker.handler("orders", group="billing")
    async def bill(message: Message) -> None:
        async def inner() -> None:
            log.warning("inside")

        await asyncio.create_task(inner())
        done.set()

    async with broker.running():
        message_id = await broker.publish("orders", {})
        async with asyncio.timeout(20):
            await done.wait()
        log.warning("outside")
    inside, outside = (record for record in caplog.records if record.name == "app")
    assert (inside.topic, inside.message_id, inside.attempt) == ("orders", message_id, 1)  # type: ignore[attr-defined]
    assert outside.topic is outside.message_id is None  # type: ignore[attr-defined]
