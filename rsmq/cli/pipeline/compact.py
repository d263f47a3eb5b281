"""`rsmq pipeline compact`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from rsmq.cli.option import Json
from rsmq.cli.pipeline.engine import load, size, spark
from rsmq.cli.pipeline.option import Master, parse_day, parse_size
from rsmq.cli.pipeline.place import absolute
from rsmq.cli.printer import dump, tabulate

FILE_SIZE = 256 << 20


def compact(
    path: Annotated[str, typer.Argument(metavar="ARCHIVE", help="The archive.")],
    topic: Annotated[list[str] | None, typer.Option(help="Only this topic; may be repeated.")] = None,
    until: Annotated[
        datetime | None, typer.Option(parser=parse_day, metavar="DAY", help="The last day. Default: yesterday (UTC).")
    ] = None,
    file_size: Annotated[
        int, typer.Option(parser=parse_size, metavar="SIZE", help="What a file should weigh.")
    ] = FILE_SIZE,
    master: Master = None,
    as_json: Json = False,
) -> None:
    """Rewrite each day as few files, sorted, each message once. Safe to cut off and to run again."""
    last = until or datetime.now(UTC).date() - timedelta(days=1)
    with spark(master) as session, load("progress").bar("compacting", as_json) as bar:

        def on_progress(done: int, total: int) -> None:
            bar.show(done, total, f"{done} of {total} days")

        done = load("compact").compact(
            session, absolute(path), until=last, topics=topic or (), file_bytes=file_size, on_progress=on_progress
        )
    if as_json:
        dump(asdict(done))
    else:
        describe(done, f"nothing to do up to {last.isoformat()}: {done.skipped} days are compact")


def describe(done: Any, nothing: str) -> None:
    """What became of each day."""
    rows = (
        (day.topic, str(day.day), day.messages, day.duplicates, f"{day.files_before} → {day.files_after}",
         f"{size(day.bytes_before)} → {size(day.bytes_after)}")
        for day in done.days
    )  # fmt: skip
    tabulate(("topic", "day", "#messages", "#duplicates", "files", "size"), rows, nothing)
