"""The options of `format("rsmq")`: read once, checked all together before anything is touched, each mistake one line.

Options travel to every executor, pickled: they name a secret (`passwordEnv`, `passwordFile`), they never hold one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote, urlunsplit

from rsmq.address import check_url, has_password, redact, split_url
from rsmq.errors import ConfigError
from rsmq.keys import check_name
from rsmq.pipeline.given import Bounds, Given, is_index, json_object
from rsmq.settings import Settings

Idempotence = Literal["none", "id", "marker", "dedupe"]
IDEMPOTENCE: Final = ("none", "id", "marker", "dedupe")
TARGETS: Final = ("topic", "inbox")
ACCESS: Final = ("url", "prefix", "passwordEnv", "passwordFile")
READ: Final = (
    *ACCESS, "subscribe", "subscribePattern", "assign", "startingOffsets", "endingOffsets", "startingTimestamp",
    "endingTimestamp", "maxOffsetsPerTrigger", "minPartitions", "failOnDataLoss", "includeHeaders", "fetchSize",
)  # fmt: skip
WRITE: Final = (*ACCESS, "topic", "target", "idempotence", "jobId", "dedupeWindow", "expiry", "ratePerTask")
OF_SPARK: Final = ("checkpointlocation", "queryname", "outputmode")
"""What Spark itself puts among the options of a streaming write."""


@dataclass(frozen=True)
class Access:
    """How an executor reaches the server. Without `url`, RSMQ_URL of whoever connects."""

    url: str | None
    prefix: str
    password_env: str | None = None
    password_file: str | None = None

    def settings(self) -> Settings:
        """The settings to connect with, the password put in. Call it where the connection is made."""
        url = Settings().url if self.url is None else self.url
        if url is None:
            raise ConfigError(
                'the option "url" is missing: .option("url", "redis://host:6379/0"), or set RSMQ_URL on the driver '
                "and on every executor"
            )
        password = self._password()
        return Settings(url=url if password is None else with_password(url, password), prefix=self.prefix)

    def _password(self) -> str | None:
        if self.password_env is not None:
            if self.password_env not in os.environ:
                raise ConfigError(f"passwordEnv={self.password_env}: this variable is not set on this machine")
            return os.environ[self.password_env]
        if self.password_file is not None:
            try:
                return Path(self.password_file).read_text(encoding="utf-8").rstrip("\r\n")
            except OSError as error:
                raise ConfigError(f"passwordFile={self.password_file}: {error.strerror}") from None
        return None


@dataclass(frozen=True)
class Selection:
    """Which streams are read: topics by name, by pattern, or single partitions of them. Exactly one is set."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    partitions: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class ReadOptions:
    """What a read was asked for. Zero in `max_offsets` and `min_partitions` means that it was not said."""

    access: Access
    selection: Selection
    start: Bounds | None
    end: Bounds | None
    max_offsets: int = 0
    min_partitions: int = 0
    fail_on_data_loss: bool = True
    include_headers: bool = False
    fetch_size: int = 5000


@dataclass(frozen=True)
class WriteOptions:
    """What a write was asked for. `topic` None: each row names its own. `expiry` None: letters live as inboxes do.

    `rate` in messages a second and task, None: as fast as it goes.
    """

    access: Access
    topic: str | None
    target: Literal["topic", "inbox"] = "topic"
    idempotence: Idempotence = "none"
    job_id: str | None = None
    dedupe_window: timedelta = timedelta(hours=1)
    expiry: timedelta | None = None
    rate: float | None = None


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """The options of a read. Raises ConfigError, one line."""
    options = Given(given, READ, "a read", others=WRITE)
    start = options.bounds("startingOffsets", "startingTimestamp", is_start=True)
    return ReadOptions(
        access=access_of(options),
        selection=selection_of(options),
        start=start,
        end=options.bounds("endingOffsets", "endingTimestamp", is_start=False),
        max_offsets=options.number("maxOffsetsPerTrigger", 0),
        min_partitions=options.number("minPartitions", 0),
        fail_on_data_loss=options.flag("failOnDataLoss", True),
        include_headers=options.flag("includeHeaders", False),
        fetch_size=options.number("fetchSize", 5000),
    )


def write_options(given: Mapping[str, str]) -> WriteOptions:
    """The options of a write. Raises ConfigError, one line."""
    options = Given(given, WRITE, "a write", others=READ, ignored=OF_SPARK)
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
    if options.text("expiry") is not None and target != "inbox":
        raise ConfigError('"expiry" belongs to target=inbox: messages of a topic live as long as its retention says')
    if options.text("ratePerTask") is not None and target != "topic":
        raise ConfigError('"ratePerTask" belongs to target=topic: letters wait in their inboxes anyway')
    topic = options.text("topic")
    return WriteOptions(
        access=access_of(options),
        topic=topic if topic is None or target == "inbox" else check_name("topic", topic),
        target=target,  # type: ignore[arg-type]
        idempotence=idempotence,  # type: ignore[arg-type]
        job_id=None if job is None else check_name("job", job),
        dedupe_window=options.duration("dedupeWindow") or timedelta(hours=1),
        expiry=options.duration("expiry"),
        rate=options.rate("ratePerTask"),
    )


def access_of(options: Given) -> Access:
    """How to connect. Refuses a secret among the options."""
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
                f"the url {redact(url)} holds a password, and options are sent to every executor and logged: leave it "
                f"out and give passwordEnv or passwordFile"
            )
    prefix = options.text("prefix")
    settings = Settings() if prefix is None else Settings(prefix=prefix)
    return Access(url, settings.prefix, env, file)


def selection_of(options: Given) -> Selection:
    """Exactly one of `subscribe`, `subscribePattern`, `assign`."""
    names = ("subscribe", "subscribePattern", "assign")
    said = [name for name in names if options.text(name) is not None]
    if len(said) != 1:
        raise ConfigError(
            f"give exactly one of subscribe, subscribePattern and assign ({' and '.join(said) or 'none'} given)"
        )
    text = options.text(said[0]) or ""
    if said[0] == "subscribe":
        topics = [name.strip() for name in text.split(",")]
        return Selection(topics=tuple(dict.fromkeys(check_name("topic", name) for name in topics)))
    if said[0] == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            raise ConfigError(f"subscribePattern={text!r} is no regular expression: {error}") from None
        return Selection(pattern=text)
    return Selection(partitions=assigned(text))


def assigned(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """`{"orders": [0, 1]}` as tuples."""
    example = 'such as {"orders": [0, 1]}'
    found = json_object("assign", text, example)
    for topic, numbers in found.items():
        check_name("topic", topic)
        if not isinstance(numbers, list) or not numbers or not all(is_index(number) for number in numbers):
            raise ConfigError(f"assign: {topic!r} needs a list of partition numbers, {example}")
    return tuple((topic, tuple(sorted(set(numbers)))) for topic, numbers in sorted(found.items()))


def with_password(url: str, password: str) -> str:
    """The URL with a password put in, its user kept."""
    parts = split_url(url)
    user, _, host = parts.netloc.rpartition("@")
    netloc = f"{user.partition(':')[0]}:{quote(password, safe='')}@{host}"
    return urlunsplit(parts._replace(netloc=netloc))
