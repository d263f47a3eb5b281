"""`rsmq exporter`: backlog, oldest message and dead letters of all groups, for Prometheus."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import anyio
import typer

from rsmq.cli.connection import connected
from rsmq.cli.log import log_to_stderr
from rsmq.cli.output import print_result
from rsmq.cli.parameters import Url, example
from rsmq.cli.serve import ending_at_signals
from rsmq.inspector.observer import Observer
from rsmq.telemetry.exporter import Exporter, group_samples
from rsmq.telemetry.listener import Address
from rsmq.telemetry.scaler import Scaler


@example("rsmq exporter --listen 127.0.0.1:9101")
def exporter(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="The address of /metrics.")] = "127.0.0.1:9101",
    url: Url = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print and log JSON.")] = False,
) -> None:
    """Serve metrics of all topics and groups to Prometheus. It only reads. One exporter is enough for all workers.

    /scale?topic=orders&group=billing answers how many workers a group needs, for an autoscaler.
    """
    log_to_stderr("info", as_json=as_json)
    anyio.run(run, Address.parse(listen), url, as_json)


async def run(address: Address, url: str | None, as_json: bool) -> None:
    """Serve until a signal."""
    async with ending_at_signals(), connected(url) as connection:
        observer = Observer(connection.client, connection.keys, connection.settings)
        async with Exporter(partial(group_samples, observer), Scaler(observer)).serving(address) as served:
            text = f"http://{served}/metrics"
            print_result({"url": text}, text, as_json=as_json)
            await anyio.sleep_forever()
