"""`rsmq doctor`: checks the server and the queues, and says what to do about problems."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from datetime import timedelta
from importlib import import_module
from typing import Annotated

import typer

from rsmq.cli.connection import CommandConnection, ask
from rsmq.cli.database import in_database, sql_room
from rsmq.cli.output import print_json, print_line
from rsmq.cli.parameters import Json, Url, duration_option, example
from rsmq.cli.tables import print_table
from rsmq.codecs.reading import store_of
from rsmq.control import Bodies
from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError, StoreUnavailable
from rsmq.inspector.doctor import QueueFacts, check_outbox, foreign_keys, gather, judge
from rsmq.inspector.state import ServerState
from rsmq.model.extension import Extension, extensions
from rsmq.model.words import count, duration, installed
from rsmq.redis.preflight import Finding

MOST_KEYS = 10
MARKS = {"ok": "ok", "warn": "WARN", "refuse": "REFUSE"}


@example("rsmq doctor --url redis://localhost:6379/0")
def doctor(
    over: Annotated[timedelta, duration_option("How long the backlog is watched.")] = "1s",  # type: ignore[assignment]
    outbox: Annotated[
        str | None, typer.Option("--outbox", metavar="DATABASE_URL", help="Also check the outbox of this database.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 for warnings, too.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Check the server, the queues and the installed libraries, and say what to do about each problem.

    Exit code 1 if a worker would refuse to start, or if the server does not answer: a readiness probe.
    """
    state = ask(url, lambda connection: examine(connection, over))
    if outbox is not None:
        rows = in_database(outbox, sql_room().read_status)
        age = timedelta(seconds=round(rows.age_seconds))
        more = check_outbox(rows.backlog, age, rows.refused, rows.error)
        state = replace(state, findings=(*state.findings, *more))
    if as_json:
        print_json(asdict(state) | {"is_refused": state.is_refused, "spark": spark_here()})
    else:
        describe(state)
    if state.is_refused or (strict and any(finding.level == "warn" for finding in state.findings)):
        raise typer.Exit(1)


async def examine(connection: CommandConnection, over: timedelta) -> ServerState:
    """The findings. If another program has written keys of rsmq, so that they cannot be read: an error with them."""
    try:
        return await look(connection, over)
    except BrokerError as error:
        found = await foreign_keys(connection.client, connection.keys) if "WRONGTYPE" in str(error) else []
        if not found:
            raise
        said = f"another program has written {count(len(found), 'key')} of rsmq: {'; '.join(found[:MOST_KEYS])}"
        raise BrokerError(f"{said}. Rename or delete them, or set RSMQ_PREFIX to a prefix of your own") from None


async def look(connection: CommandConnection, over: timedelta) -> ServerState:
    """The server, then its queues. If it refuses questions about the queues, that is one more finding."""
    state = await connection.inspector.server()
    try:
        facts = await gather(connection.client, connection.keys, connection.settings, over)
    except BrokerUnavailable:
        raise
    except BrokerError as error:
        more = [Finding("warn", "queues", f"they cannot be checked: {error}")]
    else:
        more = judge(facts)
        more += await body_findings(connection)
        for each in extensions("rsmq.doctor_rules"):
            more += await added_findings(each, connection, facts)
    return replace(state, findings=(*state.findings, *more))


async def body_findings(connection: CommandConnection) -> list[Finding]:
    """With RSMQ_BODIES: bodies that entries name, and the store does not have. Reads the topics that have some."""
    try:
        store = store_of()
        if store is None:
            return []
        found = await Bodies(connection.client, connection.keys, connection.topics, store).status()
    except (ConfigError, StoreUnavailable) as error:
        return [Finding("warn", "bodies", str(error))]
    return [
        Finding(
            "warn", "bodies",
            f"entries of topic {each.topic} name {count(len(each.lost), 'body', 'bodies')} that the store does not "
            f"have: they become dead letters (lost-body). `rsmq bodies status` has the names",
        )
        for each in found if each.lost
    ]  # fmt: skip


async def added_findings(extension: Extension, connection: CommandConnection, facts: QueueFacts) -> list[Finding]:
    """What a rule of another distribution finds. One that cannot be loaded, or fails, is a finding: others go on."""
    try:
        texts = await extension.load()(connection.client, connection.keys, facts)
        return [Finding("warn", extension.name, text) for text in texts]
    except BrokerUnavailable:
        raise
    except ConfigError as error:
        return [Finding("warn", extension.name, str(error))]
    except Exception as error:
        said = f"its rule failed ({type(error).__name__}: {error}): update or uninstall {extension.distribution}"
        return [Finding("warn", extension.name, said)]


def describe(state: ServerState) -> None:
    """Print the state for people."""
    where = state.url if state.embedded_directory is None else f"{state.url} (embedded, in {state.embedded_directory})"
    parser = "in use" if state.is_hiredis_used else "NOT in use: replies are parsed in Python, several times slower"
    print_line(f"server       {state.server} at {where}")
    print_line(f"round trip   {duration(state.round_trip)}")
    print_line(f"holds        {count(state.topics, 'topic')}, {count(state.groups, 'group')}")
    print_line(f"here         Python {state.python}, redis-py {state.redis_py}, hiredis {state.hiredis} ({parser})")
    print_line(f"newer        {', '.join(state.newer) or 'no newer stream commands'} (none is needed)")
    print_line(f"spark        {spark_here()}")
    print_table(("", "what", "finding"), ((MARKS[each.level], each.topic, each.text) for each in state.findings), "")
    refused = sum(finding.level == "refuse" for finding in state.findings)
    warned = sum(finding.level == "warn" for finding in state.findings)
    if refused:
        problems = count(refused, "problem keeps", "problems keep")
        print_line(f"{problems} a worker from starting here (with RSMQ_PREFLIGHT=warn it starts anyway)")
    else:
        print_line(f"fit to use, {count(warned, 'warning')}" if warned else "fit to use")


def spark_here() -> str:
    """The Spark and Java of `rsmq pipeline`, and the Python of sessions that `open_session` has not opened."""
    try:
        java = import_module("rsmq.pipeline.java")
    except ModuleNotFoundError:
        return "not installed: pip install 'rsmq[spark]'"
    try:
        found = f"pyspark {installed('pyspark')} on {java.find_java()}"
    except ConfigError as error:
        return f"pyspark {installed('pyspark')}, but {error}"
    program = import_module("rsmq.pipeline.python_program")
    python = program.spark_python()
    if program.has_rsmq(python):
        return found
    return (
        f"{found}; a session of your own starts {python}, which has no rsmq: use rsmq.pipeline.open_session(), or set "
        f"{program.VARIABLE}={sys.executable}"
    )
