"""`rsmq batch`: batches and what has become of their members; cancel one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Final

import typer

from rsmq.cli.connection import CommandConnection, NotFound, ask, asked
from rsmq.cli.output import confirm, print_json, print_result
from rsmq.cli.parameters import Json, Url, Yes, noun
from rsmq.cli.tables import print_rows
from rsmq.control import Batches, BatchStatus
from rsmq.inspector.text import timestamp
from rsmq.model.progress import MessageProgress
from rsmq.model.words import count, printable, suggestion

app = noun("Batches: list, show, cancel.")

WIDTH: Final = 20
MOST_TOLD: Final = 20
"""Members of which `show` tells how far they have come."""
Name = Annotated[str, typer.Argument(help="The batch.", metavar="BATCH", show_default=False)]


def bar(found: BatchStatus) -> str:
    """How many of the members have ended: `[#####...............] 25 %`."""
    part = found.left / found.total if found.total else float(found.ended is not None)
    full = int(part * WIDTH)
    return f"[{'#' * full}{'.' * (WIDTH - full)}] {int(part * 100)} %"


@app.command("list", epilog="Example: rsmq batch list")
def list_(url: Url = None, as_json: Json = False) -> None:
    """The batches that are open, or kept after their callback: how many members have ended, and how."""
    found = ask(url, lambda connection: commands(connection).every())
    rows = (
        (each.name, each.state, bar(each), each.total, each.done, each.failed, each.cancelled, each.expired,
         each.missing, timestamp(each.started))
        for each in found
    )  # fmt: skip
    columns = (
        "batch", "state", "ended", "#total", "#done", "#failed", "#cancelled", "#expired", "#missing", "started"
    )  # fmt: skip
    print_rows(found, columns, rows, asked("there are no batches", url), as_json=as_json)


@app.command("show", epilog="Example: rsmq batch show campaign-7")
def show(name: Name, url: Url = None, as_json: Json = False) -> None:
    """One batch: its members by outcome, its group and topics, and when it expires."""

    async def read(connection: CommandConnection) -> tuple[BatchStatus, list[MessageProgress]]:
        found = await one(connection, name)
        return found, await commands(connection).progress(found)

    found, progress = ask(url, read)
    if as_json:
        print_json({**asdict(found), "progress": progress})
    else:
        print_result(found, described(found, progress), as_json=False)


@app.command("cancel", epilog="Example: rsmq batch cancel campaign-7")
def cancel(name: Name, yes: Yes = False, url: Url = None, as_json: Json = False) -> None:
    """Cancel all members that have not started. What runs goes on; the callback comes when all have ended."""

    async def act(connection: CommandConnection) -> BatchStatus:
        return await commands(connection).cancel(name) or await one(connection, name)

    before = ask(url, lambda connection: one(connection, name))
    confirm(f"Cancel {count(before.missing, 'member')} of batch {name!r}?", is_agreed=yes)
    found = ask(url, act)
    print_result(found, described(found), as_json=as_json)


def commands(connection: CommandConnection) -> Batches:
    """The batches of a connection."""
    return Batches(connection.client, connection.keys, connection.topics)


async def one(connection: CommandConnection, name: str) -> BatchStatus:
    """A batch. Raises NotFound."""
    batches = commands(connection)
    found = await batches.find(name)
    if found is None:
        names = [each.name for each in await batches.every()]
        some = suggestion(name, names, "batches") or asked("there are no batches", connection.settings)
        raise NotFound(f"there is no batch {name!r}: {some}")
    return found


def described(found: BatchStatus, progress: Sequence[MessageProgress] = ()) -> str:
    """A batch for people, with what the handlers of some members have said last."""
    lines = [
        f"{found.name}: {found.state} {bar(found)}",
        f"{count(found.total, 'member')}: {found.done} done, {found.failed} failed, {found.cancelled} cancelled, "
        f"{found.expired} expired, {found.missing} not ended",
        f"group {found.group}, topics {', '.join(found.topics) or 'none so far'}",
        f"opened {timestamp(found.started)}, "
        + (f"called back {timestamp(found.ended)}" if found.ended else f"expires {timestamp(found.expires)}"),
    ]
    lines += [f"{timestamp(each.at)}  {printable(str(each))}" for each in progress[:MOST_TOLD]]
    if len(progress) > MOST_TOLD:
        lines.append(f"and {len(progress) - MOST_TOLD} more")
    return "\n".join(lines)
