"""`rsmq doctor`: is this server fit to be trusted with messages, and what to do if not."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module

import typer

from rsmq.cli.option import Json, Url
from rsmq.cli.printer import dump, say, span, tabulate
from rsmq.cli.session import ask
from rsmq.errors import ConfigError
from rsmq.inspector import ServerState, installed

MARKS = {"ok": "ok", "warn": "WARN", "refuse": "REFUSE"}


def doctor(url: Url = None, as_json: Json = False) -> None:
    """Look at the server and at what is installed here. Exit code 1 if a worker would refuse to start."""
    state = ask(url, lambda session: session.inspector.server())
    if as_json:
        dump(asdict(state) | {"is_refused": state.is_refused, "spark": spark_here()})
    else:
        describe(state)
    if state.is_refused:
        raise typer.Exit(1)


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
