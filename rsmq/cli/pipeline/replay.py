"""`rsmq pipeline replay`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from rsmq.cli.option import Json, Url
from rsmq.cli.pipeline.engine import load, size, spark, when
from rsmq.cli.pipeline.option import DryRun, Job, Master, PasswordEnv, PasswordFile, Since, Until, Where
from rsmq.cli.pipeline.place import absolute, connection, names
from rsmq.cli.printer import dump, say, tabulate


def replay(
    topics: Annotated[str, typer.Argument(metavar="TOPICS", help="A topic of the archive, or several with commas.")],
    source: Annotated[str, typer.Option("--from", metavar="ARCHIVE", help="The archive.")],
    to: Annotated[str, typer.Option(metavar="TOPIC", help="Where to; made if it does not exist.")],
    since: Since = None,
    until: Until = None,
    key: Annotated[list[str] | None, typer.Option(help="Only this key; may be repeated.")] = None,
    where: Where = None,
    rate: Annotated[
        float | None, typer.Option(min=0.01, help="Messages a second. Default: as fast as it goes.")
    ] = None,
    job: Job = None,
    dry_run: DryRun = False,
    password_env: PasswordEnv = None,
    password_file: PasswordFile = None,
    master: Master = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Publish messages of the archive again, each once. Cut off, it goes on when it is run again."""
    with connection(url, password_env, password_file, master) as options, spark(master) as session:
        part, show = load("replay"), load("progress")
        order = part.Order(absolute(source), names(topics), to, since, until, tuple(key or ()), where, rate, job)
        work = part.Replay(session, order, options)
        with show.watched(session, "counting", as_json):
            plan = work.plan()
        if not as_json:
            describe(plan)
        if not dry_run:
            with show.watched(session, f"replaying to {to}", as_json):
                work.run(plan)
    if as_json:
        dump(asdict(plan) | {"messages": plan.messages, "is_dry_run": dry_run})
    elif dry_run:
        say("nothing was published (--dry-run)")
    elif plan.is_finished:
        say(f"job {plan.job} has done this before: to publish them once more, give another --job")
    else:
        say(f"published {plan.messages} messages to {to} (job {plan.job})")


def describe(plan: Any) -> None:
    """What a replay takes."""
    columns = ("topic", "#messages", "size", "#keys (about)", "first", "last")
    rows = (
        (share.topic, share.messages, size(share.bytes), share.keys, when(share.first), when(share.last))
        for share in plan.shares
    )
    tabulate(columns, rows, "no message of the archive is meant")
