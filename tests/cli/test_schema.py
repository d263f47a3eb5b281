"""`rsmq schema check`: the table, the errors and the exit code."""

from __future__ import annotations

import json
from typing import Any

import anyio

from rsmq import Broker, Settings
from tests.cli.conftest import Cli

APP = """
from pydantic import BaseModel
from rsmq import Broker

class Order(BaseModel):
    n: int

broker = Broker()

@broker.handler("orders", group="billing")
async def bill(order: Order) -> None: ...
"""


async def test_the_command_counts_errors(server_url: str, prefix: str, cli: Cli) -> None:
    """Exit 0 without errors, 1 with the number of each, 2 for no handlers."""
    (cli.directory / "app.py").write_text(APP)
    (cli.directory / "empty.py").write_text("from rsmq import Broker\nbroker = Broker()\n")

    def run(*args: str) -> Any:
        return cli("schema", "check", *args)

    nothing = await anyio.to_thread.run_sync(run, "app:broker")
    assert (nothing.returncode, "none of the topics exists" in nothing.stdout) == (0, True), nothing.stderr
    async with Broker(Settings(url=server_url, prefix=prefix, preflight="warn")) as broker:
        await broker.publish("orders", {"n": 1})
        assert (await anyio.to_thread.run_sync(run, "app:broker")).returncode == 0
        await broker.publish_many("orders", [{"n": "x"}, {"n": "y"}, {}])
    failed = await anyio.to_thread.run_sync(run, "app:broker")
    assert failed.returncode == 1
    assert "orders/billing, unread: 1 message: the payload does not fit Order: n: Field required" in failed.stdout
    [backlog, *_] = json.loads((await anyio.to_thread.run_sync(run, "app:broker", "--json")).stdout)
    assert (backlog["checked"], backlog["failed"]) == (4, 3)
    assert (await anyio.to_thread.run_sync(run, "empty:broker")).returncode == 2
