"""`rsmq doctor`: is this server fit to be trusted with messages, and what to do if not."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import timedelta
from importlib import import_module
from typing import Annotated

import typer

from rsmq.checkup import gather, judge
from rsmq.cli.option import Json, Url
from rsmq.cli.printer import dump, say, span, tabulate
from rsmq.cli.session import Session, ask
from rsmq.cli.value import parse_span
from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError
from rsmq.inspector import ServerState, installed
from rsmq.preflight import Finding

MARKS = {"ok": "ok", "warn": "WARN", "refuse": "REFUSE"}


def doctor(
    over: Annotated[
        timedelta, typer.Option(parser=parse_span, metavar="SPAN", help="How long the lag is watched.")
    ] = "PT1S",  # type: ignore[assignment]
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 for warnings too.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Look at the server, at the queues, and at what is installed here, and say what to do about what is wrong.

    Exit code 1 if a worker would refuse to start here, or the server does not answer: a readiness probe.
    """
    state = ask(url, lambda session: examine(session, over))
    if as_json:
        dump(asdict(state) | {"is_refused": state.is_refused, "spark": spark_here()})
    else:
        describe(state)
    if state.is_refused or (strict and any(finding.level == "warn" for finding in state.findings)):
        raise typer.Exit(1)


async def examine(session: Session, over: timedelta) -> ServerState:
    """The server, then its queues: a server that refuses questions is told by its own findings."""
    state = await session.inspector.server()
    try:
        facts = await gather(session.client, session.keys, session.settings, over)
    except BrokerUnavailable:
        raise
    except BrokerError as error:
        more = [Finding("warn", "queues", f"they cannot be looked at: {error}")]
    else:
        more = judge(facts)
    return replace(state, findings=(*state.findings, *more))


def describe(state: ServerState) -> None:
    """For people."""
    where = state.url if state.embedded_directory is None else f"{state.url} (embedded, in {state.embedded_directory})"
    parser = "in use" if state.is_hiredis_used else "NOT in use: replies are parsed in Python, several times slower"
    say(f"server       {state.server} at {where}")
    say(f"round trip   {span(state.round_trip)}")
    say(f"holds        {state.topics} topics, {state.groups} groups")
    say(f"here         Python {state.python}, redis-py {state.redis_py}, hiredis {state.hiredis} ({parser})")
    say(f"newer        {', '.join(state.newer) or 'no newer stream commands'} (none is needed)")
    say(f"spark        {spark_here()}")
    tabulate(("", "what", "finding"), ((MARKS[each.level], each.topic, each.text) for each in state.findings), "")
    refused = sum(finding.level == "refuse" for finding in state.findings)
    warned = sum(finding.level == "warn" for finding in state.findings)
    if refused:
        say(f"{refused} to be fixed before a worker starts here (RSMQ_PREFLIGHT=warn starts nevertheless)")
    else:
        say(f"fit to use, {warned} warnings" if warned else "fit to use")


def spark_here() -> str:
    """What `rsmq pipeline` would run on."""
    try:
        java = import_module("rsmq.pipeline.java")
    except ModuleNotFoundError:
        return "not installed: pip install 'rsmq[spark]'"
    try:
        return f"pyspark {installed('pyspark')} on {java.find_java()}"
    except ConfigError as error:
        return f"pyspark {installed('pyspark')}, but {error}"
