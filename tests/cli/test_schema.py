"""`rsmq schema check`: the table, the errors and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio

from rsmq import Broker, Settings
from rsmq.codecs import Offload
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


async def test_the_command_reads_bodies_in_the_store_of_the_broker(
    server_url: str, prefix: str, cli: Cli, tmp_path: Path
) -> None:
    """What fits, what does not, and a body that is lost. A store that is away ends it: nothing is known of a schema."""
    folder = tmp_path / "bodies"
    offload = f"from rsmq.codecs import Offload\nbroker = Broker(offload=Offload({str(folder)!r}))"
    (cli.directory / "app.py").write_text(APP.replace("broker = Broker()", offload))

    async def run() -> Any:
        return await anyio.to_thread.run_sync(cli, "schema", "check", "app:broker")

    settings = Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1)
    async with Broker(settings, offload=Offload(folder, above="1kB")) as broker:
        await broker.publish("orders", {"n": 1, "x": "x" * 2000})
        await broker.publish("orders", {"n": 2, "x": "x" * 2000}, delay="1h")
        good = await run()
        assert good.returncode == 0, good.stdout
        bodies = set(folder.glob("*/orders/*"))
        await broker.publish("orders", {"n": "x", "x": "x" * 2000})
    wrong = await run()
    assert (wrong.returncode, "unread: 1 message: the payload does not fit Order: n: " in wrong.stdout) == (1, True)
    assert "delayed: 1 message" not in wrong.stdout
    (new,) = set(folder.glob("*/orders/*")) - bodies
    new.unlink()
    assert "unread: 1 message: its body is not in" in (await run()).stdout
    await anyio.to_thread.run_sync(folder.rename, tmp_path / "elsewhere")
    away = await run()
    assert (away.returncode, "which does not answer" in away.stderr, "Traceback" in away.stderr) == (1, True, False)
