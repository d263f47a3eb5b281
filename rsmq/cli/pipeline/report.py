"""`rsmq pipeline report`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rsmq.cli.option import Json, Url
from rsmq.cli.pipeline.engine import load, spark
from rsmq.cli.pipeline.option import Master, PasswordEnv, PasswordFile, Since, Until
from rsmq.cli.pipeline.place import absolute, connection, names
from rsmq.cli.printer import dump, say


def report(
    topics: Annotated[str, typer.Argument(metavar="TOPICS", help="Topics with commas. Default: all.")] = "",
    source: Annotated[
        str | None, typer.Option("--from", metavar="ARCHIVE", help="The archive. Default: what the topics still hold.")
    ] = None,
    since: Since = None,
    until: Until = None,
    out: Annotated[str, typer.Option(metavar="FILE", help="The page.")] = "rsmq-report.html",
    password_env: PasswordEnv = None,
    password_file: PasswordFile = None,
    master: Master = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """One HTML page with pictures: volume, latency, dead letters, fairness, hot keys, devices."""
    with connection(url, password_env, password_file, master) as options, spark(master) as session:
        part, show = load("report"), load("progress")
        order = part.Order(names(topics), options, absolute(source), since, until)
        with show.watched(session, "counting", as_json):
            facts = part.collect(session, order)
        page = part.write(facts, out)
    if as_json:
        dump(asdict(facts) | {"page": str(page)})
        return
    dead = sum(death.letters for death in facts.deaths)
    say(f"{facts.history.messages} messages, {len(facts.groups)} groups, {dead} dead letters: {page}")
