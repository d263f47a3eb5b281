"""`rsmq pipeline`: archive, compact, replay, send, report, on Spark. What they do is in `rsmq/pipeline`.

Spark is an optional extra and slow to import: nothing of it is loaded before one of these commands runs.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from importlib import import_module
from typing import Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from rsmq.address import redact, split_url
from rsmq.cli.option import Json, Url, noun
from rsmq.cli.printer import dump, printable, say, tabulate
from rsmq.cli.value import parse_moment, parse_span
from rsmq.embedded import embedded
from rsmq.errors import ConfigError
from rsmq.keys import NAME
from rsmq.settings import Settings

app = noun("Spark: archive, compact, replay, send, report.")

EXTRA = ("pyspark", "py4j", "pyarrow", "matplotlib")

Master = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Where Spark runs. Default: all cores here, or what spark-submit says."),
]
PasswordEnv = Annotated[
    str | None, typer.Option(metavar="NAME", help="Environment variable with the server's password, on executors too.")
]
PasswordFile = Annotated[str | None, typer.Option(metavar="PATH", help="File with it, on executors too.")]
Moment = Annotated[
    datetime | None, typer.Option(parser=parse_moment, metavar="TIME", help="From then on, as 2026-01-31Z.")
]


def parse_size(text: str) -> int:
    """`256MiB` as bytes."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise typer.BadParameter(f"{text!r} is no size: write 64MiB or 1GiB") from None


def parse_day(text: str) -> date:
    """`2026-01-31`."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no day: write 2026-01-31") from None


@app.command("archive", epilog="Example: rsmq pipeline archive orders --to /data/archive --every PT1M")
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
        with stopping() as is_stopping, show.bar(f"archiving {topics}") as bar:

            def on_progress(done: Any) -> None:
                bar.show(done.batches, note=f"{done.messages} messages")

            done = part.archive(session, order, on_progress, is_stopping)
    if as_json:
        dump(asdict(done))
    else:
        say(f"archived {done.messages} messages to {done.archive} ({counted(done.batches, 'batch', 'batches')})")


@app.command("compact", epilog="Example: rsmq pipeline compact /data/archive")
def compact(
    path: Annotated[str, typer.Argument(metavar="ARCHIVE", help="The archive.")],
    topic: Annotated[list[str] | None, typer.Option(help="Only this topic; may be repeated.")] = None,
    until: Annotated[
        datetime | None, typer.Option(parser=parse_day, metavar="DAY", help="The last day. Default: yesterday (UTC).")
    ] = None,
    file_size: Annotated[int, typer.Option(parser=parse_size, metavar="SIZE", help="What a file should weigh.")] = 256
    << 20,
    master: Master = None,
    as_json: Json = False,
) -> None:
    """Rewrite each day as few files, sorted, each message once. Safe to cut off and to run again."""
    last = until or datetime.now(UTC).date() - timedelta(days=1)
    with spark(master) as session, load("progress").bar("compacting") as bar:

        def on_progress(done: int, total: int) -> None:
            bar.show(done, total, f"{done} of {total} days")

        done = load("compact").compact(
            session, absolute(path), until=last, topics=topic or (), file_bytes=file_size, on_progress=on_progress
        )
    if as_json:
        dump(asdict(done))
        return
    rows = (
        (day.topic, str(day.day), day.messages, day.duplicates, f"{day.files_before} → {day.files_after}",
         f"{size(day.bytes_before)} → {size(day.bytes_after)}")
        for day in done.days
    )  # fmt: skip
    columns = ("topic", "day", "#messages", "#duplicates", "files", "size")
    tabulate(columns, rows, f"nothing to do up to {last.isoformat()}: {done.skipped} days are compact")


@app.command("replay", epilog="Example: rsmq pipeline replay orders --from /data/archive --to orders-again --dry-run")
def replay(
    topics: Annotated[str, typer.Argument(metavar="TOPICS", help="A topic of the archive, or several with commas.")],
    source: Annotated[str, typer.Option("--from", metavar="ARCHIVE", help="The archive.")],
    to: Annotated[str, typer.Option(metavar="TOPIC", help="Where to; made if it does not exist.")],
    since: Moment = None,
    until: Annotated[
        datetime | None, typer.Option(parser=parse_moment, metavar="TIME", help="Until before then.")
    ] = None,
    key: Annotated[list[str] | None, typer.Option(help="Only this key; may be repeated.")] = None,
    where: Annotated[
        str | None, typer.Option(metavar="SQL", help="Only those, as \"get_json_object(value, '$.n') > 5\".")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.01, help="Messages a second. Default: as fast as it goes.")
    ] = None,
    job: Annotated[
        str | None, typer.Option(help="Its name. Default: made of the filters, so that it is done once.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    password_env: PasswordEnv = None,
    password_file: PasswordFile = None,
    master: Master = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Publish messages of the archive again, each once. Cut off, it goes on when it is run again."""
    with connection(url, password_env, password_file, master) as options, spark(master) as session:
        part, show = load("replay"), load("progress")
        order = part.Order(
            absolute(source), names(topics), to, since, until, tuple(key or ()), where, rate, job
        )  # fmt: skip
        work = part.Replay(session, order, options)
        with show.watched(session, "counting"):
            plan = work.plan()
        if not as_json:
            describe(plan)
        if not dry_run:
            with show.watched(session, f"replaying to {to}"):
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
    rows = ((share.topic, share.messages, size(share.bytes), share.keys, when(share.first), when(share.last))
            for share in plan.shares)  # fmt: skip
    tabulate(
        ("topic", "#messages", "size", "#keys (about)", "first", "last"), rows, "no message of the archive is meant"
    )


@app.command("send", epilog="Example: rsmq pipeline send audience.parquet --to alerts --device device_id")
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
    where: Annotated[str | None, typer.Option(metavar="SQL", help="Only rows for which this is true.")] = None,
    job: Annotated[str | None, typer.Option(help="Its name. Default: made of files and options.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count, and show some.")] = False,
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
        work = part.Send(
            session, part.Order(absolute(path), to, key, value, id, device, where, job, expiry), options
        )  # fmt: skip
        with show.watched(session, "counting"):
            plan = work.plan()
        if not dry_run:
            with show.watched(session, f"sending {plan.rows} rows"):
                work.run()
    if as_json:
        dump(asdict(plan) | {"is_dry_run": dry_run})
        return
    for example in plan.examples if dry_run else ():
        say(f"  {printable(example)}")
    what = f"{plan.rows} {'messages' if device is None else 'letters'} to {to} (job {plan.job})"
    say(f"would send {what}" if dry_run else f"sent {what}")


@app.command("report", epilog="Example: rsmq pipeline report --from /data/archive --since 2026-01-31T00:00:00Z")
def report(
    topics: Annotated[str, typer.Argument(metavar="TOPICS", help="Topics with commas. Default: all.")] = "",
    source: Annotated[
        str | None, typer.Option("--from", metavar="ARCHIVE", help="The archive. Default: what the topics still hold.")
    ] = None,
    since: Moment = None,
    until: Annotated[
        datetime | None, typer.Option(parser=parse_moment, metavar="TIME", help="Until before then.")
    ] = None,
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
        with show.watched(session, "counting"):
            facts = part.collect(session, order)
        page = part.write(facts, out)
    if as_json:
        dump(asdict(facts) | {"page": str(page)})
        return
    dead = sum(death.letters for death in facts.deaths)
    say(f"{facts.history.messages} messages, {len(facts.groups)} groups, {dead} dead letters: {page}")


def load(name: str) -> Any:
    """A module of `rsmq.pipeline`, or ConfigError where the extra is not installed."""
    try:
        return import_module(f"rsmq.pipeline.{name}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in EXTRA:
            raise ConfigError(f"this needs Spark, and {package} is not installed: pip install 'rsmq[spark]'") from None
        raise


@contextmanager
def spark(master: str | None) -> Iterator[Any]:
    """A session of Spark: the one there is, or a new one for the length of the block."""
    opener = load("session")
    is_ours = opener.SparkSession.getActiveSession() is None
    session = opener.open_session(master, "rsmq pipeline")
    import_module("rsmq.pipeline").register(session)
    for name in ("py4j", "pyspark"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what went wrong is said once, by us
    try:
        yield session
    finally:
        if is_ours:
            session.stop()


@contextmanager
def connection(
    url: str | None, password_env: str | None, password_file: str | None, master: str | None
) -> Iterator[dict[str, str]]:
    """How executors reach the server, as options of `format("rsmq")`. These never hold a password."""
    settings = Settings() if url is None else Settings(url=url)
    options = {"prefix": settings.prefix}
    if password_env is not None:
        options["passwordEnv"] = password_env
    if password_file is not None:
        options["passwordFile"] = password_file
    if settings.url is None:
        with embedded() as address:
            yield options | {"url": address}
    elif not split_url(settings.url).netloc.rpartition("@")[0].partition(":")[2]:
        yield options | {"url": settings.url}
    elif (master or "local").startswith("local") or url is None:
        os.environ["RSMQ_URL"] = settings.url  # inherited by Spark's own processes on this machine
        yield options
    else:
        raise ConfigError(
            f"the url {redact(settings.url)} holds a password, which would go to every executor in the clear: leave "
            f"it out and give --password-env or --password-file, or set RSMQ_URL on every executor"
        )


def selection(topics: str) -> dict[str, str]:
    """Names with commas as `subscribe`, anything else as a pattern."""
    listed = [name.strip() for name in topics.split(",")]
    return {"subscribe": ",".join(listed)} if all(map(NAME.fullmatch, listed)) else {"subscribePattern": topics}


def names(topics: str) -> tuple[str, ...]:
    """Names with commas."""
    return tuple(dict.fromkeys(name.strip() for name in topics.split(",") if name.strip()))


def absolute(path: str | None) -> Any:
    """A path of this machine as a whole one: executors have another directory. An address stays as it is."""
    return path if path is None or "://" in path else f"file://{os.path.abspath(path)}"


@contextmanager
def stopping() -> Iterator[Any]:
    """Whether SIGTERM or Ctrl-C has come: the batch in hand is left to the next run, which does it again."""
    seen: list[int] = []
    before = {
        number: signal.signal(number, lambda each, _: seen.append(each)) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def counted(number: int, one: str, many: str) -> str:
    """A number of things."""
    return f"{number} {one if number == 1 else many}"


def size(count: int) -> str:
    """Bytes for people."""
    return ByteSize(count).human_readable()


def when(moment: datetime) -> str:
    """A time for people."""
    return moment.strftime("%Y-%m-%d %H:%M:%S")
