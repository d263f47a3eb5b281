"""`rsmq pipeline`: archive, compact, replay, send, report. The jobs themselves are in `rsmq/pipeline`.

Spark is an optional extra and slow to import: nothing of it is loaded before one of these commands runs.
"""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from importlib import import_module
from typing import Annotated, Any, Literal

import typer
from pydantic import ByteSize

from rsmq.cli.output import print_json, print_line
from rsmq.cli.parameters import Json, Plain, Url, duration_argument, noun, parse_time
from rsmq.cli.tables import print_table
from rsmq.errors import ConfigError
from rsmq.model import size
from rsmq.model.keys import NAME
from rsmq.model.settings import Settings
from rsmq.model.words import count, printable
from rsmq.redis.embedded.server import embedded
from rsmq.redis.wire.url import has_password, redact

EXTRA = ("pyspark", "py4j", "pyarrow", "matplotlib")
FILE_SIZE = 256 << 20
TIME = "%Y-%m-%d %H:%M:%S"
EXPIRIES = {
    "shift": "it is moved by the age of the message (--expires shift)",
    "drop": "it is left out, so the copies never expire (--expires drop)",
    "keep": "it stays, so what has expired meanwhile is not handled (--expires keep)",
}

app = noun("Spark: archive, compact, replay, send, report.")


def parse_size(text: str) -> int:
    """`256MiB` as bytes."""
    try:
        return size.as_size(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a valid size: write 64MiB or 1GiB") from None


def parse_day(text: str) -> date:
    """`2026-01-31`."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a valid day: write 2026-01-31") from None


Master = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Where Spark runs. Default: all cores of this machine, or that of spark-submit."),
]
PasswordEnv = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Environment variable with the server's password, also set on executors."),
]
PasswordFile = Annotated[
    str | None, typer.Option(metavar="PATH", help="File with the server's password, also on executors.")
]
Engine = Annotated[
    Literal["auto", "arrow", "spark"],
    typer.Option(help="Who does the work: arrow, in this process; spark; or auto: arrow unless there is much to do."),
]
Since = Annotated[
    datetime | None,
    typer.Option(parser=parse_time, metavar="TIME", help="Only messages from this time on, such as 2026-01-31Z."),
]
Until = Annotated[
    datetime | None, typer.Option(parser=parse_time, metavar="TIME", help="Only messages before this time.")
]
Where = Annotated[
    str | None,
    typer.Option(
        metavar="SQL", help="Only rows for which this is true, such as \"get_json_object(value, '$.n') > 5\"."
    ),
]
Job = Annotated[
    str | None, typer.Option(metavar="NAME", help="The job's name. Default: made of its options. A job runs once.")
]
Band = Annotated[
    str | None,
    typer.Option(help="The band of the target for all messages, such as bulk. Default: that of each one, or normal."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count, and show what would be done.")]


@app.command(epilog="Example: rsmq pipeline archive orders --to /data/archive --every 1m")
def archive(
    topics: Annotated[
        str, typer.Argument(metavar="TOPICS", help="A topic, several with commas, or a pattern: 'or.*'.")
    ],
    to: Annotated[str, typer.Option(metavar="PATH", help="The archive: a directory, hdfs:// or s3a://.")],
    every: Annotated[
        timedelta | None,
        typer.Option(
            parser=duration_argument, metavar="DURATION", help="Run until stopped, one batch in each interval."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Tells archives of one topic apart; retention waits for each.")] = "archive",
    batch: Annotated[int, typer.Option(min=1, help="Most messages in a batch.")] = 1_000_000,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Record in the archive what was lost before it came, and go on.")
    ] = False,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="PATH", help="Spark's own state. Default: inside the archive.")
    ] = None,
    password_env: PasswordEnv = None,
    password_file: PasswordFile = None,
    engine: Engine = "auto",
    master: Master = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Write topics to Parquet, each message once: what is there now, or continuously with --every."""
    with connection_options(url, password_env, password_file, master) as options:
        job, show, engines = load("jobs.archive"), load("spark.session"), load("jobs.engine")
        source = options | topic_option(topics)
        what = job.ArchiveOptions(source, absolute(to), name, every, batch, absolute(checkpoint), accept_loss)
        is_spark = engines.uses_spark(engine, master, what.target, lambda: engines.is_large_archive(what))
        title = f"archiving {topics}"
        with chosen(is_spark, master) as spark, stop_signal() as is_stopping, show.progress_bar(title, as_json) as bar:

            def on_progress(result: Any) -> None:
                bar(result.batches, None, count(result.messages, "message"))

            if spark is None:
                result = load("jobs.archive_by_arrow").archive_by_arrow(what, on_progress, is_stopping)
            else:
                result = job.archive(spark, what, on_progress, is_stopping)
    if as_json:
        print_json(asdict(result) | {"missing": result.missing})
    else:
        batches = count(result.batches, "batch", "batches")
        print_line(f"archived {count(result.messages, 'message')} to {result.archive} ({batches})")
        if result.gaps:
            lost = count(result.missing, "message was", "messages were")
            streams = ", ".join(sorted({f"{gap.topic}.{gap.partition}" for gap in result.gaps}))
            print_line(f"{lost} lost before the archive came, in {streams}: recorded in {result.archive}/_rsmq/gaps")


@app.command(epilog="Example: rsmq pipeline compact /data/archive")
def compact(
    path: Annotated[str, typer.Argument(metavar="ARCHIVE", help="The archive.")],
    topic: Annotated[list[str] | None, typer.Option(help="Only this topic; may be repeated.")] = None,
    until: Annotated[
        datetime | None, typer.Option(parser=parse_day, metavar="DAY", help="The last day. Default: today (UTC).")
    ] = None,
    min_batches: Annotated[
        int | None,
        typer.Option(min=1, help="Rewrite today only if it has so many new batches. Default: 20, with --until 1."),
    ] = None,
    file_size: Annotated[
        int, typer.Option(parser=parse_size, metavar="SIZE", help="The aim for the size of a file.")
    ] = FILE_SIZE,
    engine: Engine = "auto",
    master: Master = None,
    as_json: Json = False,
) -> None:
    """Rewrite each day as few sorted files, each message once. Safe to interrupt and to run again."""
    jobs, engines = load("jobs.compact"), load("jobs.engine")
    address, topics = whole_path(path), tuple(topic or ())
    today = datetime.now(UTC).date()
    last = until or today
    few = min_batches or (jobs.FEW_BATCHES if until is None else 1)
    is_spark = engines.uses_spark(engine, master, address, lambda: engines.is_large_compaction(address, last, topics))
    with chosen(is_spark, master) as spark, load("spark.session").progress_bar("compacting", as_json) as update:

        def on_progress(done: int, total: int) -> None:
            update(done, total, f"{done} of {count(total, 'day')}")

        result = jobs.compact(
            archive_at(spark, address), until=last, topics=topics, file_bytes=file_size, today=today,
            few=few, on_progress=on_progress,
        )  # fmt: skip
    if as_json:
        print_json(asdict(result))
        return
    rows = (
        (day.topic, str(day.day), day.messages, day.duplicates, f"{day.files_before} → {day.files_after}",
         f"{as_size(day.bytes_before)} → {as_size(day.bytes_after)}")
        for day in result.days
    )  # fmt: skip
    nothing = f"nothing to do up to {last.isoformat()}: {count(result.skipped, 'day is', 'days are')} compact"
    print_table(("topic", "day", "#messages", "#duplicates", "files", "size"), rows, nothing)


@app.command(epilog="Example: rsmq pipeline replay orders --from /data/archive --to orders-again --dry-run")
def replay(
    topics: Annotated[str, typer.Argument(metavar="TOPICS", help="A topic of the archive, or several with commas.")],
    source: Annotated[str, typer.Option("--from", metavar="ARCHIVE", help="The archive.")],
    to: Annotated[str, typer.Option(metavar="TOPIC", help="The target, created if it does not exist.")],
    since: Since = None,
    until: Until = None,
    key: Annotated[list[str] | None, typer.Option(help="Only this key; may be repeated.")] = None,
    where: Where = None,
    expires: Annotated[
        Literal["shift", "drop", "keep"],
        typer.Option(help="When copies expire: later by the age of the message, never, or at its own moment."),
    ] = "shift",
    with_cancelled: Annotated[
        bool, typer.Option("--with-cancelled", help="Also messages that were cancelled or replaced.")
    ] = False,
    rate: Annotated[float | None, typer.Option(min=0.01, help="Messages a second. Default: no limit.")] = None,
    band: Band = None,
    job: Job = None,
    dry_run: DryRun = False,
    password_env: PasswordEnv = None,
    password_file: PasswordFile = None,
    engine: Engine = "auto",
    master: Master = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Publish messages of the archive again, each once. If interrupted, run it again to continue."""
    with connection_options(url, password_env, password_file, master) as options:
        jobs, show, engines = load("jobs.replay"), load("spark.session"), load("jobs.engine")
        what = jobs.ReplayOptions(
            whole_path(source), topic_names(topics), to, since, until, tuple(key or ()), where, rate, job, expires,
            with_cancelled, band,
        )  # fmt: skip
        if engine == "arrow" and where is not None:
            raise ConfigError("--where is SQL, which Spark understands: use --engine spark")
        is_spark = engines.uses_spark(engine, master, what.archive, lambda: engines.is_large_replay(what))
        with chosen(is_spark, master) as spark:
            if spark is None:
                work = load("jobs.replay_by_arrow").ArrowReplay(what, options)
            else:
                work = jobs.SparkReplay(spark, what, options)
            with show.progress_bar("counting", as_json, spark):
                plan = work.plan()
            if not as_json:
                show_replay(plan, what)
            if not dry_run:
                with show.progress_bar(f"replaying to {to}", as_json, spark):
                    work.run(plan)
    if as_json:
        print_json(asdict(plan) | {"messages": plan.messages, "is_dry_run": dry_run})
    elif dry_run:
        print_line("nothing was published (--dry-run)")
    elif plan.is_finished:
        print_line(f"job {plan.job} has finished before: to publish the messages once more, use another --job")
    else:
        print_line(f"published {count(plan.messages, 'message')} to {to} (job {plan.job})")


def show_replay(plan: Any, options: Any) -> None:
    """The plan of a replay as a table, and a line for what is left out or changed."""
    rows = (
        (share.topic, share.messages, as_size(share.bytes), share.keys, f"{share.first:{TIME}}", f"{share.last:{TIME}}")
        for share in plan.shares
    )
    columns = ("topic", "#messages", "size", "#keys (about)", "first", "last")
    print_table(columns, rows, "no message of the archive matches")
    cancelled, expiring = (sum(getattr(share, name) for share in plan.shares) for name in ("cancelled", "expiring"))
    if cancelled:
        left_out = count(
            cancelled, "message that was cancelled or replaced is", "messages that were cancelled or replaced are"
        )
        print_line(f"{left_out} left out: --with-cancelled brings them, too")
    if expiring:
        print_line(f"{count(expiring, 'message has an expiry', 'messages have an expiry')}: {EXPIRIES[options.expiry]}")


@app.command(epilog="Example: rsmq pipeline send audience.parquet --to alerts --device device_id")
def send(
    path: Annotated[
        str, typer.Argument(metavar="FILE", help="Parquet, CSV or JSON lines; a directory or pattern too.")
    ],
    to: Annotated[str, typer.Option(metavar="TOPIC", help="The topic of the messages or letters.")],
    key: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column with the ordering key.")] = None,
    value: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column with the payload. Default: the row, as JSON.")
    ] = None,
    id: Annotated[str | None, typer.Option("--id", metavar="COLUMN", help="Column with the message id.")] = None,  # noqa: A002
    device: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Send letters to inboxes: column with the device's id.")
    ] = None,
    expires: Annotated[
        timedelta | None,
        typer.Option(parser=duration_argument, metavar="DURATION", help="How long letters live, as 1h."),
    ] = None,
    band: Band = None,
    where: Where = None,
    job: Job = None,
    plain: Plain = False,
    dry_run: DryRun = False,
    password_env: PasswordEnv = None,
    password_file: PasswordFile = None,
    master: Master = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Send the rows of files as messages or letters, each once. If interrupted, run it again to continue.

    They are encrypted if the newest message of the topic, or letter of the first device, is; keys are in RSMQ_KEYS.
    """
    if expires is not None and device is None:
        raise typer.BadParameter("messages do not expire: --expires needs --device")
    if band is not None and device is not None:
        raise typer.BadParameter("letters have no bands: leave out --band, or --device")
    with connection_options(url, password_env, password_file, master) as options, spark_session(master) as spark:
        jobs, show = load("jobs.send"), load("spark.session")
        what = jobs.SendOptions(absolute(path), to, key, value, id, device, where, job, expires, band, plain)
        work = jobs.SendJob(spark, what, options)
        with show.progress_bar("counting", as_json, spark):
            plan = work.plan()
        if not dry_run:
            with show.progress_bar(f"sending {count(plan.rows, 'row')}", as_json, spark):
                done = work.run()
    if as_json:
        print_json(asdict(plan) | {"is_dry_run": dry_run} | ({} if dry_run else done._asdict()))
        return
    for example in plan.examples if dry_run else ():
        print_line(f"  {printable(example)}")
    noun = "message" if device is None else "letter"
    if dry_run:
        print_line(f"would send {count(plan.rows, noun)} to {to} (job {plan.job})")
    else:
        print_line(sent_line(plan, done, noun, to))


@app.command(epilog="Example: rsmq pipeline report --from /data/archive --since 2026-01-31T00:00:00Z")
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
    engine: Engine = "auto",
    master: Master = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page with charts: volume, latency, dead letters, fairness, hot keys, devices."""
    with connection_options(url, password_env, password_file, master) as options:
        reports, show, engines = load("report.report"), load("spark.session"), load("jobs.engine")
        what = reports.ReportOptions(topic_names(topics), options, absolute(source), since, until)
        counting = load("report.count_by_arrow")
        is_spark = engines.uses_spark(engine, master, what.archive, lambda: counting.is_large_report(what))
        with chosen(is_spark, master) as spark, show.progress_bar("counting", as_json, spark):
            data = reports.collect(spark, what)
        page = load("report.page").write_page(data, out)
    if as_json:
        print_json(asdict(data) | {"page": str(page)})
        return
    dead = sum(cause.letters for cause in data.deaths)
    messages, groups = count(data.history.messages, "message"), count(len(data.groups), "group")
    print_line(f"{messages}, {groups}, {count(dead, 'dead letter')}: {page}")


def sent_line(plan: Any, done: Any, noun: str, to: str) -> str:
    """The result of a run of `send`, as one line."""
    if done.skipped and not done.stored:
        return (
            f"sent nothing: {count(done.skipped, noun)} had been sent to {to} before (job {plan.job}); to send "
            f"once more, use another --job"
        )
    before = f"; {done.skipped} had been sent before" if done.skipped else ""
    gone = plan.rows - done.stored - done.skipped
    expired = f"; {gone} had expired, or came before a clean start" if gone > 0 else ""
    return f"sent {count(done.stored, noun)} to {to} (job {plan.job}){before}{expired}"


def as_size(count: int) -> str:
    """Bytes with a unit."""
    return ByteSize(count).human_readable()


# -- what the commands share ------------------------------------------------------------------------------------------


def load(name: str) -> Any:
    """A module of `rsmq.pipeline`. Raises ConfigError if the extra is not installed."""
    try:
        return import_module(f"rsmq.pipeline.{name}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in EXTRA:
            raise ConfigError(f"this needs Spark, and {package} is not installed: pip install 'rsmq[spark]'") from None
        raise


def archive_at(spark: Any, address: str) -> Any:
    """An archive, by Spark or, without a session, by Arrow."""
    if spark is None:
        return load("jobs.arrow_archive").ArrowArchive(address)
    return load("jobs.spark_archive").SparkArchive(spark, address)


@contextmanager
def chosen(is_spark: bool, master: str | None) -> Iterator[Any]:
    """A Spark session, or None if Arrow does the work."""
    if not is_spark:
        yield None
        return
    with spark_session(master) as session:
        yield session


@contextmanager
def spark_session(master: str | None) -> Iterator[Any]:
    """The active Spark session, or a new one for the length of the block."""
    # about a package that we do not use; under spark-submit it would precede the output of --json
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    opener = load("spark.session")
    if opener.remote_address(master) or opener.remote_address(None):
        raise ConfigError(
            f"this command starts a Spark of its own or runs under spark-submit, not by Spark Connect: unset "
            f"{opener.REMOTE}, and give --master the address of a cluster"
        )
    is_new = opener.SparkSession.getActiveSession() is None
    session = opener.open_session(master, "rsmq pipeline")
    if is_new:
        session.sparkContext.setLogLevel("OFF")  # the command itself prints each error, as one line
    for name in ("py4j", "pyspark"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield session
    finally:
        if is_new:
            session.stop()


@contextmanager
def stop_signal() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or Ctrl-C has arrived. The batch in flight is not awaited: the next run repeats it."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda each, _: received.append(each))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def connection_options(
    url: str | None, password_env: str | None, password_file: str | None, master: str | None
) -> Iterator[dict[str, str]]:
    """How executors reach the server, as options of `format("rsmq")`. They never contain a password."""
    settings = Settings() if url is None else Settings(url=url)
    secrets = {"passwordEnv": password_env, "passwordFile": password_file}
    options = {"prefix": settings.prefix} | {name: text for name, text in secrets.items() if text is not None}
    if settings.url is None:
        with embedded() as address:
            yield options | {"url": address}
    elif not has_password(settings.url):
        yield options | {"url": settings.url}
    elif (master or "local").startswith("local") or url is None:
        os.environ["RSMQ_URL"] = settings.url  # inherited by Spark's own processes on this machine
        yield options
    else:
        raise ConfigError(
            f"the url {redact(settings.url)} contains a password, which would go to every executor in plain text: "
            f"leave it out and use --password-env or --password-file, or set RSMQ_URL on every executor"
        )


def topic_option(topics: str) -> dict[str, str]:
    """Names with commas as `subscribe`, anything else as `subscribePattern`."""
    names = [name.strip() for name in topics.split(",")]
    return {"subscribe": ",".join(names)} if all(map(NAME.fullmatch, names)) else {"subscribePattern": topics}


def topic_names(topics: str) -> tuple[str, ...]:
    """Names with commas as a tuple."""
    return tuple(dict.fromkeys(name.strip() for name in topics.split(",") if name.strip()))


def whole_path(path: str) -> str:
    """A path that is given, as an absolute URL."""
    return absolute(path) or path


def absolute(path: str | None) -> str | None:
    """A path of this machine as an absolute URL: executors have another directory. URLs stay as they are."""
    return path if path is None or "://" in path else f"file://{os.path.abspath(path)}"
