"""`rsmq exporter`: lag, pending, oldest and dead letters of all groups, for Prometheus."""

from __future__ import annotations

import contextlib
from typing import Annotated

import anyio
import typer

from rsmq.cli.journal import log_to_stderr
from rsmq.cli.option import Url
from rsmq.cli.printer import dump, say
from rsmq.cli.session import connected
from rsmq.telemetry.endpoint import Address
from rsmq.telemetry.exporter import Exporter
from rsmq.telemetry.survey import Survey


def exporter(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to answer /metrics.")] = "127.0.0.1:9101",
    url: Url = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print and log JSON.")] = False,
) -> None:
    """Answer Prometheus with the figures of all topics and groups. Only reads. One is enough for all workers."""
    log_to_stderr("info", as_json=as_json)
    with contextlib.suppress(KeyboardInterrupt):
        anyio.run(run, Address.parse(listen), url, as_json)


async def run(address: Address, url: str | None, as_json: bool) -> None:
    """Serve until interrupted."""
    async with connected(url) as session:
        survey = Survey(session.client, session.keys, session.settings)
        async with Exporter(survey.take).serving(address) as where:
            text = f"http://{where}/metrics"
            dump({"url": text}) if as_json else say(text)
            await anyio.sleep_forever()
