"""`rsmq pipeline send`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import typer

from rsmq.cli.option import Json, Url
from rsmq.cli.pipeline.engine import load, spark
from rsmq.cli.pipeline.option import DryRun, Job, Master, PasswordEnv, PasswordFile, Where
from rsmq.cli.pipeline.place import absolute, connection
from rsmq.cli.printer import dump, printable, say
from rsmq.cli.value import parse_span


def send(
    path: Annotated[
        str, typer.Argument(metavar="FILE", help="Parquet, CSV or JSON lines; a directory or pattern too.")
    ],
    to: Annotated[str, typer.Option(metavar="TOPIC", help="The topic; of letters, what they are sent under.")],
    key: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column with the ordering key.")] = None,
    value: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column with the payload. Default: the row, as JSON.")
    ] = None,
    id: Annotated[str | None, typer.Option("--id", metavar="COLUMN", help="Column with the message id.")] = None,  # noqa: A002
    device: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Into device inboxes: column with the device's id.")
    ] = None,
    expiry: Annotated[
        timedelta | None, typer.Option(parser=parse_span, metavar="SPAN", help="How long letters live, as PT1H.")
    ] = None,
    where: Where = None,
    job: Job = None,
    dry_run: DryRun = False,
    password_env: PasswordEnv = None,
    password_file: PasswordFile = None,
    master: Master = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Send the rows of files as messages or letters, each once. Cut off, it goes on when it is run again."""
    if expiry is not None and device is None:
        raise typer.BadParameter("messages do not expire: --expiry goes with --device")
    with connection(url, password_env, password_file, master) as options, spark(master) as session:
        part, show = load("send"), load("progress")
        order = part.Order(absolute(path), to, key, value, id, device, where, job, expiry)
        work = part.Send(session, order, options)
        with show.watched(session, "counting", as_json):
            plan = work.plan()
        if not dry_run:
            with show.watched(session, f"sending {plan.rows} rows", as_json):
                work.run()
    if as_json:
        dump(asdict(plan) | {"is_dry_run": dry_run})
        return
    for example in plan.examples if dry_run else ():
        say(f"  {printable(example)}")
    what = f"{plan.rows} {'messages' if device is None else 'letters'} to {to} (job {plan.job})"
    say(f"would send {what}" if dry_run else f"sent {what}")
