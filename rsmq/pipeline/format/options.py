"""The options of `format("rsmq")`. All are checked before anything is read or written.

Spark pickles options and sends them to every executor. They name a secret (`passwordEnv`, `passwordFile`) and never
contain one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote, urlunsplit

from rsmq.errors import ConfigError
from rsmq.model.keys import check_name
from rsmq.model.layout import checked_band
from rsmq.model.settings import Settings
from rsmq.pipeline.format.option_reader import Bounds, OptionReader, json_object
from rsmq.pipeline.format.payloads import DECODE, Decode
from rsmq.redis.wire.url import check_url, has_password, redact, split_url

Idempotence = Literal["none", "id", "marker", "dedupe"]
Encode = Literal["newest", "none", "all"]
ENCODE: Final = ("newest", "none", "all")
IDEMPOTENCE: Final = ("none", "id", "marker", "dedupe")
STRATEGIES: Final = ("latest", "error")
TARGETS: Final = ("topic", "inbox")
ACCESS: Final = ("url", "prefix", "passwordEnv", "passwordFile")
READ: Final = (
    *ACCESS, "subscribe", "subscribePattern", "assign", "startingOffsets", "endingOffsets", "startingTimestamp",
    "endingTimestamp", "startingOffsetsByTimestamp", "endingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy",
    "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "minPartitions", "failOnDataLoss",
    "includeHeaders", "fetchSize", "group", "decode",
)  # fmt: skip
WRITE: Final = (
    *ACCESS,
    "topic",
    "target",
    "idempotence",
    "jobId",
    "dedupeWindow",
    "expires",
    "ratePerTask",
    "band",
    "encode",
    "resultFile",
)
SPARK_OPTIONS: Final = ("checkpointlocation", "queryname", "outputmode")
"""Options that Spark adds to a streaming write."""


@dataclass(frozen=True)
class Access:
    """How an executor reaches the server. Without `url` each machine uses its own RSMQ_URL.

    If that is not set either, `url` is the embedded server of the driver's project, if it runs.
    """

    url: str | None
    prefix: str
    password_env: str | None = None
    password_file: str | None = None

    def settings(self) -> Settings:
        """The settings with the password filled in. Call it on the machine that connects."""
        url = Settings().url if self.url is None else self.url
        if url is None:
            root = embedded().project_root(Path.cwd())
            raise ConfigError(
                f"the embedded server of {root} does not run: start it with `rsmq server`. For "
                f'another server give .option("url", "redis://host:6379/0"), or set RSMQ_URL on the driver and on '
                f"every executor"
            )
        password = self._password()
        return Settings(url=url if password is None else with_password(url, password), prefix=self.prefix)

    def _password(self) -> str | None:
        if self.password_env is not None:
            if self.password_env not in os.environ:
                raise ConfigError(f"passwordEnv={self.password_env}: this variable is not set on this machine")
            return secret(f"passwordEnv={self.password_env}", os.environ[self.password_env])
        if self.password_file is not None:
            try:
                text = Path(self.password_file).read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"passwordFile={self.password_file}: {error.strerror}") from None
            return secret(f"passwordFile={self.password_file}", text)
        return None


def secret(option: str, text: str) -> str:
    """A password without the line end of its file. An empty one would be no password. Raises ConfigError."""
    if not (password := text.rstrip("\r\n")):
        raise ConfigError(f"{option}: the password is empty on this machine")
    return password


@dataclass(frozen=True)
class TopicSelection:
    """The streams to read: topics by name, topics by pattern, or single partitions. Exactly one is set."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    partitions: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class ReadOptions:
    """The options of a read. Zero in `max_offsets`, `min_offsets` and `min_partitions`: not set.

    `columns`: what it yields. `needs_start`: there must be an entry at or after a starting time. `group`: the name by
    which a stream is known on the server. `decode`: what becomes of payloads that are encoded, or lie in a store.
    """

    access: Access
    selection: TopicSelection
    start: Bounds | None
    end: Bounds | None
    max_offsets: int = 0
    min_partitions: int = 0
    fail_on_data_loss: bool = True
    include_headers: bool = False
    fetch_size: int = 5000
    columns: tuple[str, ...] = ()
    min_offsets: int = 0
    max_delay: timedelta = timedelta(minutes=15)
    needs_start: bool = False
    group: str | None = None
    decode: Decode = "none"


@dataclass(frozen=True)
class WriteOptions:
    """The options of a write. `topic` None: each row names its own. `expires` None: letters live as long as inboxes.

    `rate`: messages a second for each task; None: no limit. `result_file`: where the driver writes what was stored.
    `band`: the band of the topic that the rows go to. `encode`: whether payloads are encrypted.
    """

    access: Access
    topic: str | None
    target: Literal["topic", "inbox"] = "topic"
    idempotence: Idempotence = "none"
    job_id: str | None = None
    dedupe_window: timedelta = timedelta(hours=1)
    expires: timedelta | None = None
    rate: float | None = None
    result_file: str | None = None
    band: str | None = None
    encode: Encode = "newest"


def read_options(values: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a read. Raises ConfigError."""
    options = OptionReader(values, READ, "a read", others=WRITE)
    group = options.text("group")
    if options.text("maxTriggerDelay") is not None and options.text("minOffsetsPerTrigger") is None:
        raise ConfigError('"maxTriggerDelay" ends the waiting of minOffsetsPerTrigger: give both')
    return ReadOptions(
        start=options.bounds("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp", is_start=True),
        access=access_of(options),
        selection=selection_of(options),
        end=options.bounds("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp", is_start=False),
        max_offsets=options.number("maxOffsetsPerTrigger", 0),
        min_partitions=options.number("minPartitions", 0),
        fail_on_data_loss=options.flag("failOnDataLoss", True),
        include_headers=options.flag("includeHeaders", False),
        fetch_size=options.number("fetchSize", 5000),
        min_offsets=options.number("minOffsetsPerTrigger", 0),
        max_delay=options.duration("maxTriggerDelay") or timedelta(minutes=15),
        needs_start=options.choice("startingOffsetsByTimestampStrategy", STRATEGIES) == "error",
        group=None if group is None else check_name("group", group),
        decode=options.choice("decode", DECODE),  # type: ignore[arg-type]
    )


def write_options(values: Mapping[str, str]) -> WriteOptions:
    """Parse the options of a write. Raises ConfigError."""
    options = OptionReader(values, WRITE, "a write", others=READ, ignored=SPARK_OPTIONS)
    idempotence = options.choice("idempotence", IDEMPOTENCE)
    target = options.choice("target", TARGETS)
    job = options.text("jobId")
    if idempotence == "marker" and job is None:
        raise ConfigError('idempotence=marker needs "jobId": a name that stays the same when the same job runs again')
    if job is not None and idempotence != "marker":
        raise ConfigError(f'"jobId" belongs to idempotence=marker, not to {idempotence}')
    if options.text("dedupeWindow") is not None and idempotence != "dedupe":
        raise ConfigError(f'"dedupeWindow" belongs to idempotence=dedupe, not to {idempotence}')
    if target == "inbox" and idempotence not in ("none", "marker"):
        raise ConfigError(f"target=inbox goes with idempotence=none or marker, not {idempotence}")
    if options.text("expires") is not None and target != "inbox":
        raise ConfigError('"expires" belongs to target=inbox: messages of a topic live as long as its retention')
    if options.text("ratePerTask") is not None and target != "topic":
        raise ConfigError(
            '"ratePerTask" belongs to target=topic: letters wait in their inboxes until the device reads them'
        )
    band = options.text("band")
    if band is not None and (target != "topic" or idempotence == "id"):
        raise ConfigError('"band" belongs to target=topic, and not to idempotence=id, which restores where a row was')
    topic, encode = options.text("topic"), options.choice("encode", ENCODE)
    if idempotence == "id" and options.text("encode") is None:
        encode = "none"  # it restores what was stored
    return WriteOptions(
        access=access_of(options),
        topic=topic if topic is None or target == "inbox" else check_name("topic", topic),
        target=target,  # type: ignore[arg-type]
        idempotence=idempotence,  # type: ignore[arg-type]
        job_id=None if job is None else check_name("job", job),
        dedupe_window=options.duration("dedupeWindow") or timedelta(hours=1),
        expires=options.duration("expires"),
        rate=options.rate("ratePerTask"),
        result_file=options.text("resultFile"),
        band=None if band is None else checked_band(band),
        encode=encode,  # type: ignore[arg-type]
    )


def access_of(options: OptionReader) -> Access:
    """How to connect. Raises ConfigError for a password among the options."""
    url, env, file = options.text("url"), options.text("passwordEnv"), options.text("passwordFile")
    if env is not None and file is not None:
        raise ConfigError("give passwordEnv or passwordFile, not both")
    if env is not None and env.upper().startswith("RSMQ_"):
        raise ConfigError(
            f"passwordEnv={env}: names with RSMQ_ are settings of rsmq; choose another, such as REDIS_PASSWORD"
        )
    if url is not None:
        check_url(url)
        if has_password(url):
            raise ConfigError(
                f"the url {redact(url)} contains a password, and options are sent to every executor and logged: leave "
                f"it out and use passwordEnv or passwordFile"
            )
    prefix = options.text("prefix")
    settings = Settings() if prefix is None else Settings(prefix=prefix)
    return Access(url or running_url(settings), settings.prefix, env, file)


def running_url(settings: Settings) -> str | None:
    """The embedded server of this project, if it runs and no other is set. Tasks of this machine have another
    directory, so it is found when Spark plans."""
    found: str | None = embedded().EmbeddedServer().running_url() if settings.url is None else None
    return found


def embedded() -> Any:
    """The module of the embedded server. An executor that is given a server does not load it."""
    return import_module("rsmq.redis.embedded.server")


def selection_of(options: OptionReader) -> TopicSelection:
    """Exactly one of `subscribe`, `subscribePattern`, `assign`."""
    names = ("subscribe", "subscribePattern", "assign")
    texts = {name: text for name in names if (text := options.text(name)) is not None}
    if len(texts) != 1:
        raise ConfigError(
            f"give exactly one of subscribe, subscribePattern and assign ({' and '.join(texts) or 'none'} given)"
        )
    [(name, text)] = texts.items()
    if name == "subscribe":
        topics = [topic.strip() for topic in text.split(",")]
        return TopicSelection(topics=tuple(dict.fromkeys(check_name("topic", topic) for topic in topics)))
    if name == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            raise ConfigError(f"subscribePattern={text!r} is not a regular expression: {error}") from None
        return TopicSelection(pattern=text)
    return TopicSelection(partitions=assigned_partitions(text))


def assigned_partitions(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """`{"orders": [0, 1]}` as tuples."""
    example = 'such as {"orders": [0, 1]}'
    by_topic = json_object("assign", text, example)
    for topic, numbers in by_topic.items():
        check_name("topic", topic)
        if not isinstance(numbers, list) or not numbers or not all(type(n) is int and n >= 0 for n in numbers):
            raise ConfigError(f"assign: {topic!r} needs a list of partition numbers, {example}")
    return tuple((topic, tuple(sorted(set(numbers)))) for topic, numbers in sorted(by_topic.items()))


def with_password(url: str, password: str) -> str:
    """The URL with this password, its user unchanged."""
    parts = split_url(url)
    user, _, host = parts.netloc.rpartition("@")
    netloc = f"{user.partition(':')[0]}:{quote(password, safe='')}@{host}"
    return urlunsplit(parts._replace(netloc=netloc))
