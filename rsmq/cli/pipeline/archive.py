"""`rsmq pipeline archive`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any

import typer

from rsmq.cli.option import Json, Url
from rsmq.cli.pipeline.engine import counted, load, spark, stopping
from rsmq.cli.pipeline.option import Master, PasswordEnv, PasswordFile
from rsmq.cli.pipeline.place import absolute, connection, selection
from rsmq.cli.printer import dump, say
from rsmq.cli.value import parse_span


def archive(
    topics: Annotated[
        str, typer.Argument(metavar="TOPICS", help="A topic, several with commas, or a pattern: 'or.*'.")
    ],
    to: Annotated[str, typer.Option(metavar="PATH", help="The archive: a directory, hdfs:// or s3a://.")],
    every: Annotated[
        timedelta | None, typer.Option(parser=parse_span, metavar="SPAN", help="Go on for ever, a batch this often.")
    ] = None,
    name: Annotated[str, typer.Option(help="Tells archives of one topic apart; retention waits for each.")] = "archive",
    batch: Annotated[int, typer.Option(min=1, help="Most messages in a batch.")] = 1_000_000,
    checkpoint: Annotated[str | None, typer.Option(metavar="PATH", help="Spark's own state. Default: inside.")] = None,
    password_env: PasswordEnv = None,
    password_file: PasswordFile = None,
    master: Master = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Write topics to Parquet, each message once: what is there now, or for ever with --every."""
    with connection(url, password_env, password_file, master) as options, spark(master) as session:
        part, show = load("archive"), load("progress")
        order = part.Order(options | selection(topics), absolute(to), name, every, batch, absolute(checkpoint))
        with stopping() as is_stopping, show.bar(f"archiving {topics}", as_json) as bar:

            def on_progress(done: Any) -> None:
                bar.show(done.batches, note=f"{done.messages} messages")

            done = part.archive(session, order, on_progress, is_stopping)
    if as_json:
        dump(asdict(done))
    else:
        say(f"archived {done.messages} messages to {done.archive} ({counted(done.batches, 'batch', 'batches')})")
