"""Many of everything in one process: more handlers and calls at once than the client library has connections for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from rsmq import Broker, Settings
from rsmq.redis.client.client import MOST_AT_ONCE
from rsmq.redis.client.connector import Client
from tests.patience import until
from tests.servers import Server

HANDLERS = 120


async def test_commands_beyond_the_pool_wait_for_a_connection(client: Client, server: Server) -> None:
    """Hundreds of commands at the same time succeed, and few connections are made."""
    with server.client() as plain:
        before = len(plain.client_list())
        replies = await asyncio.gather(*[client.execute_command("PING") for _ in range(400)])
        piped = await asyncio.gather(*[client.pipelined([("PING",)]) for _ in range(400)])
        assert len(plain.client_list()) - before <= MOST_AT_ONCE
    assert replies == [b"PONG"] * 400
    assert piped == [[b"PONG"]] * 400


async def test_worker_with_many_handlers_serves_all_of_them(
    server_url: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each handler gets its partition and its message, without a warning about connections."""
    broker, done = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1)), set[int]()

    def register(number: int) -> Callable[..., Any]:
        @broker.handler(f"t{number}", group="g")
        async def handle(payload: dict[str, int]) -> None:
            done.add(number)

        return handle

    for number in range(HANDLERS):
        register(number)
    with caplog.at_level(logging.WARNING, "rsmq"):
        async with broker.running():
            async with anyio.create_task_group() as tasks:
                for number in range(HANDLERS):
                    tasks.start_soon(broker.publish, f"t{number}", {"n": number})
            await until(lambda: len(done) >= HANDLERS, "every handler was called", seconds=60)
    assert "onnections" not in caplog.text
